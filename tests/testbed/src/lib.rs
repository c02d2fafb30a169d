//! The environment in which tests, the demo and the lab run the agent: namespaces, taps, simulated guests with Linux
//! network stacks, their records, and the agent as a process.
//!
//! ```text
//!  guest namespace (kernel client)          host namespace
//!  ┌──────────────────┐                     ┌───────────────────────────────┐
//!  │ eth0 (a tap)     │     pump: what      │ tap0 ── XDP `port`            │
//!  │   └─ fd ─────────┼── QEMU does between ┼─ fd        │                  │
//!  └──────────────────┘   NIC and tap       │           br0 10.0.2.2/16     │
//!  user-space client ─────────────────────── ─ fd of tap1                   │
//!  (smoltcp owns the fd)                    │ xdp-imds (the agent)          │
//!                                           └───────────────────────────────┘
//! ```
//!
//! Everything runs inside network namespaces created here and removed when their guards are dropped. Nearly all of it
//! needs root; [`privileged`] decides whether a test can run.

pub mod agent;
pub mod answers;
pub mod bpffs;
pub mod guest;
pub mod host;
pub mod netns;
pub mod packages;
pub mod privileged;
pub mod process;
pub mod pump;
pub mod record;
#[cfg(feature = "schema")]
pub mod schema;
pub mod tap;
pub mod vhost;

use anyhow::{Context as _, Result};
use std::time::{Duration, Instant};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// Calls `look` every 50 ms until it succeeds: waits for a condition that another process makes true.
///
/// # Errors
/// Returns the last error of `look` once `patience` is over.
pub fn eventually<T>(patience: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + patience;
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("still fails after {patience:?}"));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
