//! Values that only their issuer can create and accept: subscriptions, invalidation tokens and gate
//! tokens.
//!
//! A caller returns a subscription to its monitor to end the subscription. It returns a token to
//! the cache that issued the token, to end an invalidation or to open the gate.
//!
//! Code must not be able to end a subscription or an invalidation of other code. So each value
//! contains the number of its issuer, which is unique in the process. The values cannot be copied
//! or built from numbers, and returning a value consumes it.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// The issuer's number in values that nobody issued. No issuer has this number.
const NO_ISSUER: u64 = 0;

/// An issuer of [`Subscription`]s, [`InvalidationToken`]s and [`GateToken`]s.
///
/// A monitor has one issuer for its subscriptions. An [`Invalidator`](super::Invalidator) has one
/// for its tokens. An issuer accepts only the values that it issued.
///
/// Keep an issuer private. Code that has the issuer can make a value with any number, and so end
/// the subscriptions and invalidations of other code.
///
/// # Examples
/// ```
/// use hmem_core::monitor::{Subscription, TokenIssuer};
///
/// let (ours, other) = (TokenIssuer::new(), TokenIssuer::new());
/// assert_eq!(Subscription::new(&ours, 7).redeem(&ours), Some(7));
/// assert_eq!(Subscription::new(&other, 7).redeem(&ours), None);
/// ```
#[derive(Debug)]
pub struct TokenIssuer(u64);

impl TokenIssuer {
    /// Creates an issuer that differs from every other issuer of the process.
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(NO_ISSUER + 1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for TokenIssuer {
    fn default() -> Self {
        Self::new()
    }
}

/// The issuer's number and the number that the issuer chose for one value.
#[derive(Debug)]
struct Issued {
    issuer: u64,
    number: u64,
}

impl Issued {
    const UNNUMBERED: Self = Self { issuer: NO_ISSUER, number: 0 };

    #[inline]
    fn number(&self, issuer: &TokenIssuer) -> Option<u64> {
        (self.issuer == issuer.0).then_some(self.number)
    }
}

/// A subscription to a monitor, which [`Monitor::unsubscribe`](super::Monitor::unsubscribe) ends.
///
/// Only the monitor that issued a subscription ends it. A subscription that is dropped instead
/// stays in force until its monitor is dropped.
///
/// A subscription cannot be ended twice:
/// ```compile_fail,E0382
/// # use hmem_core::monitor::{Monitor, Subscription};
/// fn end_twice(monitor: &dyn Monitor, subscription: Subscription) {
///     monitor.unsubscribe(subscription);
///     monitor.unsubscribe(subscription);
/// }
/// ```
///
/// A copy cannot be made:
/// ```compile_fail,E0599
/// # use hmem_core::monitor::{Monitor, Subscription};
/// fn end_a_copy(monitor: &dyn Monitor, subscription: &Subscription) {
///     monitor.unsubscribe(Subscription::clone(subscription));
/// }
/// ```
///
/// The number of another subscription is of no use:
/// ```compile_fail,E0423
/// # use hmem_core::monitor::{Monitor, Subscription};
/// fn end_all(monitor: &dyn Monitor) {
///     (0..64).for_each(|number| monitor.unsubscribe(Subscription(number)));
/// }
/// ```
#[derive(Debug)]
pub struct Subscription(Issued);

impl Subscription {
    /// Issues a subscription. The monitor chooses the number, which need not be unique.
    #[inline]
    pub fn new(issuer: &TokenIssuer, number: u64) -> Self {
        Self(Issued { issuer: issuer.0, number })
    }

    /// Creates a subscription that no issuer accepts, for monitors that store nothing about their
    /// subscriptions.
    pub const fn unnumbered() -> Self {
        Self(Issued::UNNUMBERED)
    }

    /// Returns the number of the subscription, or `None` if `issuer` did not issue it.
    #[inline]
    #[must_use = "the number names the subscription to end"]
    pub fn redeem(self, issuer: &TokenIssuer) -> Option<u64> {
        self.0.number(issuer)
    }
}

/// The values that a monitor keeps for its subscriptions.
///
/// # Examples
/// ```
/// use hmem_core::monitor::SubscriptionMap;
///
/// let (mut ranges, mut other) = (SubscriptionMap::default(), SubscriptionMap::<u64>::default());
/// let subscription = ranges.insert("range");
/// assert_eq!(ranges.get(&subscription), Some(&"range"));
/// assert_eq!(ranges.remove(other.insert(1)), None);
/// assert_eq!(ranges.remove(subscription), Some("range"));
/// ```
#[derive(Debug)]
pub struct SubscriptionMap<T> {
    issuer: TokenIssuer,
    /// The number of the subscription that was issued last.
    last: u64,
    by_number: HashMap<u64, T>,
}

impl<T> SubscriptionMap<T> {
    /// Issues a subscription and keeps `value` for it.
    pub fn insert(&mut self, value: T) -> Subscription {
        self.last += 1;
        self.by_number.insert(self.last, value);
        Subscription::new(&self.issuer, self.last)
    }

    /// Returns the value of a subscription, or `None` if the subscription belongs to another map.
    #[must_use]
    pub fn get(&self, subscription: &Subscription) -> Option<&T> {
        let number = subscription.0.number(&self.issuer)?;
        self.by_number.get(&number)
    }

    /// Removes the value of a subscription. Returns `None` if the subscription belongs to another
    /// map.
    pub fn remove(&mut self, subscription: Subscription) -> Option<T> {
        self.by_number.remove(&subscription.redeem(&self.issuer)?)
    }

    /// Removes the values of all subscriptions, in no particular order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.by_number.drain().map(|(_, value)| value)
    }

    /// Returns the values of all subscriptions, in no particular order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.by_number.values()
    }

    /// Returns the number of subscriptions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns true if there is no subscription.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }
}

impl<T> Default for SubscriptionMap<T> {
    fn default() -> Self {
        Self { issuer: TokenIssuer::new(), last: 0, by_number: HashMap::new() }
    }
}

/// A token that identifies a change in progress.
///
/// [`Invalidator::invalidate_start`](super::Invalidator::invalidate_start) returns it, and
/// [`Invalidator::invalidate_end`](super::Invalidator::invalidate_end) of the same invalidator
/// consumes it. The token cannot be copied or built from a number:
/// ```compile_fail,E0423
/// # use hmem_core::monitor::{InvalidationToken, Invalidator};
/// fn end_the_change_of_another(invalidator: &dyn Invalidator) {
///     invalidator.invalidate_end(InvalidationToken(0));
/// }
/// ```
#[derive(Debug)]
#[must_use = "nothing over the range can be cached until the change is ended"]
pub struct InvalidationToken(Issued);

impl InvalidationToken {
    /// Issues a token. The invalidator chooses the number.
    #[inline]
    pub fn new(issuer: &TokenIssuer, number: u64) -> Self {
        Self(Issued { issuer: issuer.0, number })
    }

    /// Creates a token that no issuer accepts, for invalidators that store nothing about a change
    /// in progress.
    #[inline]
    pub const fn unnumbered() -> Self {
        Self(Issued::UNNUMBERED)
    }

    /// Returns the number of the token, or `None` if `issuer` did not issue it.
    #[inline]
    #[must_use = "the number names the change to end"]
    pub fn redeem(self, issuer: &TokenIssuer) -> Option<u64> {
        self.0.number(issuer)
    }
}

/// A token for one close of a cache's gate.
///
/// [`Invalidator::close_gate`](super::Invalidator::close_gate) returns it, and
/// [`Invalidator::open_gate`](super::Invalidator::open_gate) of the same invalidator consumes it.
/// So a gate is never opened more often than it was closed:
/// ```compile_fail,E0382
/// # use hmem_core::monitor::Invalidator;
/// fn open_twice(invalidator: &dyn Invalidator) {
///     let closed = invalidator.close_gate();
///     invalidator.open_gate(closed);
///     invalidator.open_gate(closed);
/// }
/// ```
#[derive(Debug)]
#[must_use = "no lookup of the cache hits until the gate is opened"]
pub struct GateToken(Issued);

impl GateToken {
    /// Issues a token.
    #[inline]
    pub fn new(issuer: &TokenIssuer) -> Self {
        Self(Issued { issuer: issuer.0, number: 0 })
    }

    /// Creates a token that no issuer accepts, for invalidators without a gate.
    pub const fn unnumbered() -> Self {
        Self(Issued::UNNUMBERED)
    }

    /// Returns true if `issuer` issued the token.
    #[inline]
    #[must_use = "only the issuer's own token opens the gate"]
    pub fn redeem(self, issuer: &TokenIssuer) -> bool {
        self.0.number(issuer).is_some()
    }
}
