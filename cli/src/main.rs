//! The hmem command.

fn main() {}
