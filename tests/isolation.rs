//! No guest gets a byte of another guest's data, whatever it claims and whatever happens to its tap or record.

#[path = "isolation/ports.rs"]
mod ports;
#[path = "isolation/secrets.rs"]
mod secrets;
#[path = "isolation/taps.rs"]
mod taps;
#[path = "isolation/tokens.rs"]
mod tokens;
#[path = "isolation/vm.rs"]
mod vm;
