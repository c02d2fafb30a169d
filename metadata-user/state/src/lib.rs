//! State of the agent that outlives it: one file each, private, replaced whole or not at all.

pub mod mailboxes;
pub mod private_file;
pub mod token_file;
