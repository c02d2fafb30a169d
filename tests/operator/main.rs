//! What an operator sees and calls: verbs, their output, the page, the manual.

mod command_line;
mod doctor;
mod first_day;
mod printing;
mod top;
mod trace;
