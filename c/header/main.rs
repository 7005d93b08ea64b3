//! Prints the C header of the C library's code:
//!
//! ```text
//! cargo run --manifest-path c/header/Cargo.toml >c/include/hmem.h
//! ```

#![forbid(unsafe_code)]

use std::path::Path;

use cbindgen::{Builder, Config};

fn main() {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let config = Config::from_file(library.join("cbindgen.toml")).expect("the settings");
    // The modules of the file are sources too.
    let builder = Builder::new().with_config(config).with_src(library.join("src/lib.rs"));
    let mut header = Vec::new();
    builder.generate().expect("the code has C items").write(&mut header);
    let header = String::from_utf8(header).expect("the header is UTF-8");
    print!("{}", header.replace(" * # Safety\n", " * The caller promises:\n"));
}
