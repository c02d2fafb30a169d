//! Guests on taps: what they get from a running agent, and what hostile ones cannot get or break.

mod answers_on_a_tap;
mod boot_storm;
mod every_address;
mod guest_state;
mod guest_traffic;
mod holds;
mod hostile;
mod isolation;
mod long_answers;
mod one_guest;
mod overload;
mod requests_on_a_tap;
mod seeing;
mod vectors_on_a_tap;
