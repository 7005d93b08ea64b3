//! Defines the handle by which a test owns the fake driver of its process.

/// Defines the handle of a fake driver, the static with its state, and its configuration by an
/// environment variable.
///
/// The crate that uses the macro must define the types `State` (with `new(profile)`, `heal`,
/// `live`, `profile`, `calls`), `Profile` (with `named`, `set`, `absent`) and `Live`, and a module
/// `entry` (with `symbol`, `known`).
#[macro_export]
macro_rules! fake_driver {
    ($(#[doc = $doc:literal])+ $name:ident, fails with $code:ident, set by $variable:literal) => {
        /// The state of this process's driver. A process has one driver, like one instance of the
        /// real library.
        static STATE: parking_lot::Mutex<Option<State>> = parking_lot::Mutex::new(None);
        /// Locked by the test that uses the driver, so that one test runs at a time.
        static TURN: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

        /// Creates the driver that the environment variable describes: the name of a profile,
        /// followed by `;name=number` for its fields and `;symbol=code` for functions that always
        /// fail. Without a name, the profile is the default one. Panics for any other text.
        fn from_environment() -> State {
            let text = std::env::var($variable).unwrap_or_default();
            let mut words = text.split(';').map(str::trim);
            let mut profile = match words.next().unwrap_or_default() {
                "" => Profile::default(),
                name => Profile::named(name)
                    .unwrap_or_else(|| panic!("{}: no profile {name}", $variable)),
            };
            let mut faults = Vec::new();
            for word in words {
                let pair = word.split_once('=');
                let pair = pair.and_then(|(name, number)| Some((name, number.parse().ok()?)));
                let (name, number) = pair.unwrap_or_else(|| panic!("{}: {word}", $variable));
                if !profile.set(name, number) {
                    faults.push((known(name), $code(number)));
                }
            }
            let mut state = State::new(profile);
            for (symbol, code) in faults {
                state.calls.fail_always(symbol, code.into());
            }
            state
        }

        fn known(symbol: &str) -> &'static str {
            entry::known(symbol).unwrap_or_else(|| panic!("the library has no {symbol}"))
        }

        $(#[doc = $doc])+
        #[derive(Debug)]
        pub struct $name {
            _turn: parking_lot::MutexGuard<'static, ()>,
        }

        impl $name {
            /// Starts a driver with this profile, before its initialisation call. All users of the
            /// driver must be gone when the handle is dropped.
            #[must_use]
            pub fn start(profile: Profile) -> Self {
                let turn = TURN.lock();
                *STATE.lock() = Some(State::new(profile));
                Self { _turn: turn }
            }

            fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
                run(STATE.lock().as_mut().expect("started"))
            }

            /// Returns the address of a function, or `None` if the driver does not define it or
            /// the profile lists it as absent.
            #[must_use]
            pub fn symbol(&self, name: &str) -> Option<*const ()> {
                let absent = self.with(|state| state.profile.absent.contains(&name));
                if absent { None } else { entry::symbol(name) }
            }

            /// Changes the profile of the running driver.
            pub fn change(&self, change: impl FnOnce(&mut Profile)) {
                self.with(|state| change(&mut state.profile));
            }

            /// Makes the `nth` next call of a function fail: 1 is the next call. If the function
            /// has an earlier fault, counting starts after the call that fails because of it.
            ///
            /// # Panics
            /// Panics if the driver has no such function.
            pub fn fail_nth(&self, symbol: &str, nth: u64, code: $code) {
                self.with(|state| state.calls.fail_nth(known(symbol), nth, code.into()));
            }

            /// Makes every later call of a function fail.
            ///
            /// # Panics
            /// Panics if the driver has no such function.
            pub fn fail_always(&self, symbol: &str, code: $code) {
                self.with(|state| state.calls.fail_always(known(symbol), code.into()));
            }

            /// Removes all injected faults and their effects, such as a lost device.
            pub fn heal(&self) {
                self.with(State::heal);
            }

            /// Returns the number of calls of a function, failed calls included.
            ///
            /// # Panics
            /// Panics if the driver has no such function.
            #[must_use]
            pub fn calls(&self, symbol: &str) -> u64 {
                let symbol = known(symbol);
                self.with(|state| state.calls.of(symbol))
            }

            /// Counts the live objects.
            #[must_use]
            pub fn live(&self) -> Live {
                self.with(|state| state.live())
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                *STATE.lock() = None;
            }
        }

        /// Starts a new driver with this profile, and returns a lookup of its functions by name.
        /// Does not exclude other tests: only one may run in the process. The lookup returns `None`
        /// for a function that the driver does not define or the profile lists as absent.
        pub fn restart(profile: Profile) -> impl Fn(&str) -> Option<*const ()> {
            let absent = profile.absent.clone();
            *STATE.lock() = Some(State::new(profile));
            move |name| if absent.contains(&name) { None } else { entry::symbol(name) }
        }
    };
}
