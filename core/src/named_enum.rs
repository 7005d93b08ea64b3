//! The macro [`named_enum!`](crate::named_enum!).

/// Declares an enum whose values have names. The enum gets the list `ALL`, the method `name`, a
/// `Display` that writes the name, and the usual derives with `Copy` and `Hash`.
///
/// ```
/// hmem_core::named_enum! {
///     /// A kind of call into the driver.
///     pub enum DriverCall {
///         /// The call that allocates memory.
///         Allocate = "driver_allocate",
///         /// The call that frees memory.
///         Free = "driver_free",
///     }
/// }
/// assert_eq!(DriverCall::ALL, [DriverCall::Allocate, DriverCall::Free]);
/// assert_eq!(DriverCall::Free.name(), "driver_free");
/// ```
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $vis:vis enum $type:ident {
            $($(#[$value_meta:meta])* $value:ident = $name:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $type { $($(#[$value_meta])* $value,)+ }

        impl $type {
            /// All values, in the order of the enum.
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// Returns the name of the value in messages.
            #[must_use]
            $vis const fn name(self) -> &'static str {
                match self { $(Self::$value => $name,)+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
