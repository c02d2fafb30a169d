//! The xdp-imds command.
fn main() {}
