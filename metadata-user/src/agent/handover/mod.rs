//! One agent takes the ports of another over while guests are served: `xdp-imds serve --takeover`.
//!
//! ```text
//!  the agent that runs ([`give`])                        the one that takes over ([`take`])
//!                                    ◀── hello ────────  makes hubs on the other side, reads all records,
//!  serves as before                  ─── welcome ──────▶ renders them under the slots in the pinned maps
//!  claims its connections,           ◀── drain ────────  is ready
//!  freezes and saves what guests
//!  wrote, changes no port any more   ─── draining ─────▶ reads what was saved
//!  will not go on, come what may     ◀── take ─────────
//!                                    ─── yours ────────▶ sends all identities to its hubs, but for what is claimed, and
//!  asks it what guests of its own    ◀── serving ──────  replaces each port's program
//!  want to know that it wrote since  ─── ask ──────────▶
//!                                    ◀── answer ───────
//!  ends, and its hubs with it        ─── done ─────────▶ forgets the claims
//! ```
//!
//! Until `yours` either may give up or die, and the agent that runs goes on as if nothing had been. After it the ports are
//! the other's; should that one die before it serves, they stay closed, and the next start goes on with what is pinned.
//! If the agent that runs dies, at whatever point, the other takes over at once.
//!
//! Every wait has a limit. The socket is `<run>/takeover.sock`, mode 0600, and its peer must be root or the agent's own user.

mod give;
mod listener;
mod succession;
mod take;
mod wire;

use std::time::Duration;

pub(super) use give::{End, Giver, hand_over};
pub(super) use listener::{Call, TakeoverListener};
pub(super) use succession::Succession;
pub(super) use take::{Heard, Taking};

/// The socket's name in the run directory.
const SOCKET: &str = "takeover.sock";

/// From a connection to its first word, and to the answer to it.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// From there until the one that takes over is ready: it renders every record.
const READY_WITHIN: Duration = Duration::from_secs(900);
/// For workers to claim what they have, and what guests wrote to be on disk.
const DRAINING_WITHIN: Duration = Duration::from_secs(10);
/// For the one that takes over to read it.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// For it to take all ports.
const SERVING_WITHIN: Duration = Duration::from_secs(30);
