//! One agent takes over the ports of another while guests are served: `xdp-imds serve --takeover`.
//!
//! ```text
//!  the previous agent ([`give`])                         the next agent ([`take`])
//!                                    ◀── hello ────────  makes hubs on the other side, reads all records,
//!  serves as before                  ─── welcome ──────▶ renders them under the slots in the pinned maps
//!  claims its connections,           ◀── drain ────────  is ready
//!  freezes and saves what guests
//!  wrote, changes no port any more   ─── draining ─────▶ reads what was saved
//!  does not continue in any case     ◀── take ─────────
//!                                    ─── yours ────────▶ sends all identities to its hubs, but for what is claimed, and
//!  asks it what guests of its own    ◀── serving ──────  replaces each port's program
//!  want to know that it wrote since  ─── ask ──────────▶
//!                                    ◀── answer ───────
//!  ends, and its hubs with it        ─── done ─────────▶ forgets the claims
//! ```
//!
//! Until `yours` either agent may give up or die, and the previous agent continues as before. After it the ports belong to
//! the next agent. If that agent dies before it serves, the ports stay closed, and the next start adopts what is pinned. If
//! the previous agent dies, at any point, the next agent takes over at once.
//!
//! Every wait has a limit. The socket is `<run>/takeover.sock`, mode 0600, and its peer must be root or the agent's own user.

mod give;
mod listener;
mod succession;
mod take;
mod wire;

use std::time::Duration;

pub(super) use give::{End, HandoverState, hand_over};
pub(super) use listener::{Call, TakeoverListener};
pub(super) use succession::Succession;
pub(super) use take::{PreviousEvent, Takeover};

/// The socket's name in the run directory.
const SOCKET: &str = "takeover.sock";

/// Limit from a connection to its first message, and from that to the answer.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Limit from there until the next agent is ready: it renders every record.
const READY_WITHIN: Duration = Duration::from_secs(900);
/// Limit for workers to claim their connections and for what guests wrote to be on disk.
const DRAINING_WITHIN: Duration = Duration::from_secs(10);
/// Limit for the next agent to read it.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// Limit for it to take all ports.
const SERVING_WITHIN: Duration = Duration::from_secs(30);
