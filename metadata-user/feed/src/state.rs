//! The agent's state on disk. Each file is private, and a write replaces it as a whole or not at all.
//!
//! | below the state directory | content | limit | if the file is unusable |
//! |---|---|---|---|
//! | `token.key` ([`token_file`]) | keys of session tokens | 4 KiB | the file is set aside, and a new key is made; with the wrong rights, the agent does not start |
//! | `vms/<uuid>.json` ([`mailboxes`]) | what one guest wrote | 4 MiB | the file is set aside, and the guest starts with nothing |
//! | `dialects` ([`asked_dialects`]) | which dialects each guest has asked for | 16 MiB | guests' first answers come some 50 µs later |
//! | `instances/*.json` | one record of the API, with a [`state_file::FileHeader`] | 16 MiB | the file stays and is not served |
//! | `records.snapshot` | the last good records, as a [`state_file::StateFileKind`] | 256 MiB | written anew once records are read |
//! | `kubevirt.vmis` | the last known VMIs, as a [`state_file::StateFileKind`] | 64 MiB | written anew once the API server answers |
//!
//! [`private_file`] reads and writes all of them. [`save_queue`] repeats writes that fail.

pub mod asked_dialects;
pub mod mailboxes;
pub mod private_file;
pub mod save_queue;
pub mod state_file;
pub mod token_file;
