//! Guests on taps: what they get from a running agent, and what hostile ones cannot get or break.

mod answers_on_a_tap;
mod auditing;
mod boot_storm;
mod counting;
mod every_address;
mod full_rings;
mod guest_state;
mod guest_traffic;
mod hostile;
mod isolation;
mod long_answers;
mod lossy_guest;
mod narrow_taps;
mod one_guest;
mod overload;
mod vectors_on_a_tap;
