//! Comparison of layouts, constants and signatures with a vendor's headers by the C compiler, which
//! runs nothing.
#![allow(dead_code)] // Each test binary uses a part.

use std::{
    env,
    fmt::{Display, Write as _},
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

/// Returns true if the text of a header has the name as a whole word.
pub(crate) fn has_word(header: &str, name: &str) -> bool {
    header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == name)
}

/// A C program that compiles only if the headers agree with this workspace.
pub(crate) struct Assertions {
    code: String,
}

impl Assertions {
    /// Starts a program that includes these headers.
    pub(crate) fn about(headers: &[&str]) -> Self {
        let includes = ["stdbool.h", "stddef.h"].iter().chain(headers);
        Self { code: includes.map(|header| format!("#include <{header}>\n")).collect() }
    }

    /// Asserts the value of a constant expression.
    pub(crate) fn value(&mut self, expression: impl Display, ours: i128) {
        writeln!(
            self.code,
            "_Static_assert((long long)({expression}) == {ours}LL, \"{expression} is not {ours}\");"
        )
        .expect("a string");
    }

    /// Asserts the size of a type.
    pub(crate) fn size(&mut self, c: &str, ours: usize) {
        self.value(format_args!("sizeof({c})"), ours as i128);
    }

    /// Asserts the offset of a field.
    pub(crate) fn offset(&mut self, c: &str, field: &str, ours: usize) {
        self.value(format_args!("offsetof({c}, {field})"), ours as i128);
    }

    /// Asserts the type of a function, in the C spelling of its arguments and result.
    pub(crate) fn function(&mut self, symbol: &str, arguments: &[impl AsRef<str>], result: &str) {
        let arguments: Vec<_> = arguments.iter().map(AsRef::as_ref).collect();
        let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
        writeln!(self.code, "{result} (*const p_{symbol})({arguments}) = {symbol};")
            .expect("a string");
    }

    /// Compiles the program with the headers of a folder. On failure, returns the compiler's
    /// messages, or that there is no C compiler.
    pub(crate) fn compile(&self, include: &Path) -> Result<(), String> {
        compile(include, &self.code)
    }

    /// Checks that every assertion holds for the headers of a folder.
    ///
    /// # Panics
    /// Panics if an assertion fails.
    pub(crate) fn hold(&self, include: &Path) {
        self.compile(include).unwrap_or_else(|error| panic!("{}:\n{error}", include.display()));
    }

    /// Checks that the compiler notices a wrong assertion: `right` is in the program, and the
    /// program with `wrong` in its place does not compile.
    ///
    /// # Panics
    /// Panics if `right` is not asserted, or if `wrong` compiles.
    pub(crate) fn rejects(&self, include: &Path, right: &str, wrong: &str) {
        assert!(self.code.contains(right), "{right} is not compared");
        compile(include, &self.code.replace(right, wrong)).expect_err(wrong);
    }
}

fn compile(include: &Path, code: &str) -> Result<(), String> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut compiler = Command::new(&compiler)
        .args(["-std=gnu11", "-fsyntax-only", "-Werror=incompatible-pointer-types"])
        .args(["-x", "c", "-", "-I"])
        .arg(include)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("no C compiler ({compiler}: {error})"))?;
    let mut input = compiler.stdin.take().expect("a pipe");
    input.write_all(code.as_bytes()).expect("the compiler reads the program");
    drop(input);
    let output = compiler.wait_with_output().expect("a C compiler");
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
