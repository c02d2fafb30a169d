//! The agent's state on disk. Each file is private, and a write replaces it as a whole or not at all.

pub mod mailboxes;
pub mod private_file;
pub mod token_file;
