//! Values of a vendor's library: opaque handles and C strings.

/// Declares types for the handles of a vendor's library, which are opaque pointers in C. A value is
/// a number that is never dereferenced, so every thread may hold the handle.
///
/// # Examples
/// ```
/// hmem_iface_kit::handles! {
///     /// `quokka_stream_t`: a stream of a device.
///     Stream,
/// }
/// assert!(Stream::NULL.is_null());
/// assert!(!Stream(0x1000).is_null());
/// ```
#[macro_export]
macro_rules! handles {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {$(
        $(#[doc = $doc])+
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);

        impl $name {
            /// The null handle.
            pub const NULL: Self = Self(0);

            /// Returns true for the null handle.
            #[must_use]
            pub const fn is_null(self) -> bool {
                self.0 == 0
            }
        }
    )+};
}

/// Converts the C string in a buffer to a `String`. Without a NUL, converts the whole buffer.
pub fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}
