//! No guest obtains an octet of another's, whatever it claims to be and whatever becomes of its tap or record.

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
