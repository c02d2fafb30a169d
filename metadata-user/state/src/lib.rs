//! State of the agent that outlives it: one file each, private, replaced whole or not at all.
//!
//! | below the state directory | holds | limit | if it cannot be used |
//! |---|---|---|---|
//! | `token.key` ([`token_file`]) | the keys of session tokens | 4 KiB | the agent does not start |
//! | `vms/<uuid>.json` ([`mailboxes`]) | what one guest wrote | 4 MiB | put aside; the guest begins anew |
//! | `instances/*.json` | one record of the API, a [`form::Head`] beside it | 16 MiB | left there, not served |
//! | `records.snapshot` | the last good records, as a [`form::Form`] | 256 MiB | written anew once records are read |
//! | `kubevirt.vmis` | the VMIs last known, as a [`form::Form`] | 64 MiB | written anew once the API server answers |
//!
//! All are read and written by [`private_file`].

pub mod form;
pub mod mailboxes;
pub mod private_file;
pub mod token_file;
