//! No guest gets a byte of another guest's data, whatever it claims and whatever happens to its tap or record.

mod ports;
mod secrets;
mod taps;
mod tokens;
mod vm;
