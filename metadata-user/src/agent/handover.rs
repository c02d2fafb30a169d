//! One agent takes over the ports of another while guests are served: `xdp-imds serve --takeover`.
//!
//! ```text
//!  the previous agent ([`give`])                         the next agent ([`take`])
//!                                    ◀── hello ────────  makes hubs on the other side, reads all records,
//!  serves as before                  ─── welcome ──────▶ renders them under the slots in the pinned maps
//!  claims its connections,           ◀── drain ────────  is ready
//!  freezes and saves what guests
//!  wrote, changes no port any more   ─── draining ─────▶ reads what was saved
//!  promises not to continue          ◀── take ─────────
//!                                    ─── yours ────────▶ steers all frames to its hubs, except those of claimed
//!                                    ◀── serving ──────  connections, and replaces each port's program
//!  passes on questions of its guests ─── ask ──────────▶
//!                                    ◀── answer ───────
//!  ends, and its hubs with it        ─── done ─────────▶ forgets the claims
//! ```
//!
//! Until `yours`, the previous agent continues as before if either agent gives up or the next agent dies. After `yours`
//! the ports belong to the next agent. If it dies before it serves, the ports stay closed, and the next start adopts
//! what is pinned. If the previous agent dies at any point, the next agent takes over at once.
//!
//! Every wait has a limit. The socket is `<run>/takeover.sock`, mode 0600, and its peer must be root or the agent's own
//! user.

mod give;
mod listener;
mod succession;
mod take;
mod wire;

use std::time::Duration;

pub(super) use give::{End, HandoverState, hand_over};
pub(super) use listener::{Call, TakeoverCall, TakeoverListener};
pub(super) use succession::Succession;
pub(super) use take::{PreviousEvent, Takeover};

/// The socket's name in the run directory.
const SOCKET: &str = "takeover.sock";

/// Limit from a connection to its first message, and from that message to the answer.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Limit from the welcome until the next agent has rendered every record and is ready.
const READY_WITHIN: Duration = Duration::from_secs(900);
/// Limit for workers to claim their connections and for the agent to save what guests wrote.
const DRAINING_WITHIN: Duration = Duration::from_secs(10);
/// Limit for the next agent to read what was saved.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// Limit for the next agent to take all ports.
const SERVING_WITHIN: Duration = Duration::from_secs(30);
