//! Opening an iface with a file that is not the vendor's library.

use std::path::Path;

use hmem_core::{Error, ErrorKind, IfaceKind};

/// Checks the errors for an absent file, for a file that is no library, and for another library.
/// `open` opens the iface with the library at a path. `variable` is the environment variable that
/// the remedy names, and `first_symbol` is the function that the iface looks up first.
pub(crate) fn is_unavailable_with_the_reason(
    iface: IfaceKind,
    variable: &str,
    first_symbol: &str,
    open: impl Fn(&Path) -> Error,
) {
    let refused = |library: &str| {
        let error = open(library.as_ref());
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.iface_kind(), Some(iface));
        assert_eq!(error.context_value("library"), Some(library));
        assert!(error.remedy_text().is_some());
        error
    };
    let error = refused("/nowhere/library.so.1");
    assert!(error.to_string().contains("cannot open shared object file"), "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains(variable)), "{error}");
    let error = refused(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    assert!(error.to_string().contains("invalid ELF header"), "{error}");
    let error = refused("libm.so.6");
    assert_eq!(error.context_value("symbol"), Some(first_symbol));
}
