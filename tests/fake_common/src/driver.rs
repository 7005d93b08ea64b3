//! The handle by which a test owns the fake driver of its process.

/// Defines the handle of a fake driver, the driver's state, and its start from the environment.
///
/// The crate has a `State` (`new(profile)`, `heal`, `live`, `profile`, `calls`), a `Profile`
/// (`named`, `set`, `absent`), a `Live`, and a module `entry` (`symbol`, `known`).
#[macro_export]
macro_rules! fake_driver {
    ($(#[doc = $doc:literal])+ $name:ident, fails with $code:ident, told by $variable:literal) => {
        /// The driver of this process: there is one, as there is of the real library.
        static STATE: parking_lot::Mutex<Option<State>> = parking_lot::Mutex::new(None);
        /// Keeps the driver to one test at a time.
        static TURN: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

        /// Returns the driver that the environment describes: the name of a profile, followed by
        /// `;name=number` for its fields and `;symbol=code` for calls that always fail.
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
            /// Starts a driver of a profile, not initialised yet. Its users must be gone when the
            /// handle is dropped.
            #[must_use]
            pub fn start(profile: Profile) -> Self {
                let turn = TURN.lock();
                *STATE.lock() = Some(State::new(profile));
                Self { _turn: turn }
            }

            fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
                run(STATE.lock().as_mut().expect("started"))
            }

            /// Returns the address of a function, unless the profile lacks it.
            #[must_use]
            pub fn symbol(&self, name: &str) -> Option<*const ()> {
                let absent = self.with(|state| state.profile.absent.contains(&name));
                if absent { None } else { entry::symbol(name) }
            }

            /// Changes the profile of the running driver.
            pub fn change(&self, change: impl FnOnce(&mut Profile)) {
                self.with(|state| change(&mut state.profile));
            }

            /// Makes the `nth` call of a function from now on fail; 1 is the next call.
            pub fn fail_nth(&self, symbol: &str, nth: u64, code: $code) {
                self.with(|state| state.calls.fail_nth(known(symbol), nth, code.into()));
            }

            /// Makes every call of a function fail.
            pub fn fail_always(&self, symbol: &str, code: $code) {
                self.with(|state| state.calls.fail_always(known(symbol), code.into()));
            }

            /// Removes all faults, with their consequences.
            pub fn heal(&self) {
                self.with(State::heal);
            }

            /// Returns the number of calls of a function, failed calls included.
            #[must_use]
            pub fn calls(&self, symbol: &str) -> u64 {
                let symbol = known(symbol);
                self.with(|state| state.calls.of(symbol))
            }

            /// Returns the numbers of live objects.
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

        /// Starts a new driver of a profile, and returns the lookup of its functions. It is for a
        /// process in which one test runs at a time: without a handle nothing excludes other tests.
        pub fn restart(profile: Profile) -> impl Fn(&str) -> Option<*const ()> {
            let absent = profile.absent.clone();
            *STATE.lock() = Some(State::new(profile));
            move |name| if absent.contains(&name) { None } else { entry::symbol(name) }
        }
    };
}
