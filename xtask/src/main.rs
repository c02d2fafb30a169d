//! `cargo xtask <verb>`: build, test, demo and lab.
fn main() {}
