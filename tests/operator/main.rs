//! What an operator sees and calls: verbs, their output, the page, the manual.

mod command_line;
mod doctor;
mod first_day;
mod manual_pages;
mod printing;
mod seeing;
mod top;
mod top_page;
mod trace;
