//! Loads and attaches the eBPF programs, fills their maps, and detaches them. The only crate that depends on aya.
//!
//! # How it works
//!
//! ```text
//!  namespace of a pod             the agent's namespace
//!  ┌────────────────────────┐     ┌──────────────────────────────────────────────────────┐
//!  │ tap1 ── `port_tcx` #2 ─┼─────┼──────────────────────── `ring` ──── RING ───▶ worker │
//!  │ tap0 ── `port` #2 ─────┼─────┼▶ imds-out ══ imds-in ── `socket` ── SOCKETS ▶ AF_XDP │
//!  │   ▲  PORTS, IDENTITIES │HUBS │                                                      │
//!  │   └────────────────────┼─────┼── `hub` ── imds-tap ◀── write() of one frame         │
//!  └────────────────────────┘     │   GUESTS, GUEST_DEVICES                              │
//!                                 │ tap7 ◀── `hub_tcx` ── imds-gso ◀── write() of 64 KiB │
//!                                 │   GUESTS, HOME_DEVICES                               │
//!                                 │ tap7 ── `port` #1 ─▶ the same hub                    │
//!                                 └──────────────────────────────────────────────────────┘
//! ```
//!
//! 1. [`Steering::start`] makes the hub's devices (`hub_devices`), loads the object (`object`) and attaches `socket` to
//!    the inner veth. Only then does it enter the hub in `HUBS`, because a veth accepts redirected frames only while
//!    its peer runs XDP. It attaches `hub` to the hub tap (`hubs`). No port is steered yet.
//! 2. [`Steering::attach`] makes a tap a port: the tap gets an instance of `port` that knows the number of its
//!    namespace, and a token bucket. The port now drops every frame for a metadata address, because no identity is
//!    bound on it.
//! 3. [`Steering::bind`] binds a MAC on a port to a slot. It writes the outbound entries first and the inbound entry
//!    last. [`Steering::unbind`] clears them in reverse order (`maps`).
//! 4. [`Steering::detach`] frees the slots and removes the programs from the tap. It also cleans up after a deleted
//!    tap, which [`LinkWatch`](metadata_links::devices::LinkWatch) reports. A new tap of the same name is attached
//!    again.
//!
//! # Who owns what
//!
//! [`Steering`] has four owners and does only what needs more than one of them. [`Maps`] owns the kernel's tables,
//! [`Hubs`] the devices, rings and taps of the workers, [`Attachments`] the ports with their programs, links, pins and
//! numbers, and [`InheritedPorts`] the ports of a previous agent. What the programs report is in [`ProgramReports`].
//!
//! # Limits of the kernel
//!
//! - A program cannot read which namespace a frame came from. Each namespace has a stub that sets the number and
//!   calls the one shared `port` (`object`).
//! - An interface index can be looked up only from within its namespace. A thread enters the other namespace for each
//!   attach and bind there (`netns` of metadata-links).
//! - An attachment ends with its owner unless it is pinned (`pins`). Pinned ports stay closed when the agent dies for
//!   any reason, and the next agent inherits them (`takeover`). Without pins, guests' traffic flows as if there were no
//!   agent.
//! - Not every device can send a frame back (`XDP_TX`). A tap can; a veth can only while its peer accepts such
//!   frames, which the kernel does not report. The kernel therefore answers by itself ([`SteerConfig::answers`]) on
//!   taps only; on other devices every frame goes to the worker.
//! - A full ring is not reported: a redirect or `XDP_TX` without room counts as success. The devices' own counters
//!   are read every few seconds (`devices`), and each CPU, up to eight, has its own queue of the hub.
//! - A frame cannot be redirected to a device whose driver is not ready for it (a veth whose peer has neither XDP nor
//!   GRO), nor if it is longer than the device's MTU. A classifier delivers frames for such a device and long frames,
//!   within the agent's own namespace only (`hubs`).
//! - XDP on a large frame has a cost. A classifier serves guests that have booted (`attachments`).
//! - A classifier cannot redirect a frame to another namespace. It sends such frames to the worker through a ring
//!   (`hubs`).
//! - A device carries one XDP program. A port with another program is an error that names the program.
//!
//! # Calling it
//!
//! All methods block. Attach, bind, unbind and detach take well under a millisecond (a few system calls, plus a
//! thread start for another namespace). The first port of a namespace takes some tens of milliseconds for the
//! verifier. Start and drop take about a tenth of a second. An async task may call them if nothing urgent waits for
//! that task. [`Steering`] is `Send` and has one owner.
//!
//! # Requirements
//!
//! Root, or `CAP_NET_ADMIN`, `CAP_BPF` and `CAP_SYS_ADMIN` (to enter namespaces and to make a private bpffs; it
//! includes `CAP_BPF` and `CAP_PERFMON`), and `CAP_SYS_PTRACE` for namespaces of another user's process; a kernel with
//! the features that `features` tests, whatever its version; a mounted `/proc`. Each port needs one file descriptor,
//! each namespace with ports one more; `start` raises the soft limit on open files to the hard limit.

mod attach;
mod attachments;
mod config;
mod devices;
mod documents;
mod error;
mod features;
mod hub_devices;
mod hubs;
mod link;
mod maps;
mod mounts;
mod object;
mod pin_watch;
mod pins;
pub mod probe;
mod steering;
mod takeover;
mod trace;

pub use attach::AttachmentFault;
pub use attachments::{
    AnswerPath, AttachmentCheck, Attachments, BUSY, BoundIdentity, CHECK_EVERY, CHECKED_AT_ONCE,
    LOOKS_AT_ONCE, QUIET, SWITCHES_AT_ONCE, SteeringProgram,
};
pub use config::{ClosedTaps, PortLimits, PreviousAgent, SteerConfig, SteeringMode};
pub use devices::{DeviceLookup, HubLosses, Losses, NAMESPACES_AT_ONCE, exists};
pub use documents::{BodyKey, DocumentTable, Editions, KernelResponse, SlotTokens};
pub use error::SteerError;
pub use hub_devices::{HUB_MTU, check_port_name, is_hub_device, is_hub_tap, release_hubs};
pub use hubs::{Hub, Hubs, Ring, hub_queues};
pub use maps::{Counters, FlowClaimer, Maps};
pub use metadata_common::maps::HUB_QUEUES;
pub use pin_watch::PinWatch;
pub use pins::{PINS_VERSION, PinsError, RELEASE_GRACE, ReleaseSummary, is_pins_version, release};
pub use steering::Steering;
pub use takeover::InheritedPorts;
pub use trace::{ProgramReports, TraceError, TraceSession, UnknownSender};

use metadata_common::maps::MAX_HUBS;

/// Hubs of one agent. Hub numbers are unique on a node, and an agent uses one side of them: 0 to 31 or 32 to 63. The
/// agent that takes over uses the other side.
pub const HUBS_OF_A_SIDE: u32 = MAX_HUBS / 2;

/// Longest hub name, in bytes. Interface names have at most 15, and the longest suffix is `-out`.
pub const HUB_PREFIX_MAX: usize = 11;
