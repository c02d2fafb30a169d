//! What the generator's system calls cost by themselves.
//!
//! A guest's `write` to its tap does the host's work: it makes the packet, runs XDP or the bridge, and often the
//! server's softirq. That is what is measured, so only what a call costs before it does any of it is the
//! generator's: a `write` refused for its length, a `read` that finds nothing, a wait for nothing. These are
//! the least prices there can be, the same for every subject; whoever serves at least cost gains nothing by them.

use super::plan::Prices;
use anyhow::{Result, ensure};
use rustix::event::epoll;
use std::time::Instant;
use support::tap::Tap;

/// Calls of one kind in one trial, and trials; the cheapest counts, as nobody else's work makes a call cheaper.
const CALLS: u32 = 20_000;
const TRIALS: u32 = 7;

/// Prices the calls on a tap with nothing to read.
pub(super) fn prices(tap: &Tap) -> Result<Prices> {
    let mut buffer = [0; 2_048];
    while tap.receive(0, &mut buffer)?.is_some() {}
    // A tap refuses what is shorter than its header and Ethernet's (Linux: drivers/net/tun.c).
    ensure!(tap.send(0, &[0]).is_err(), "the tap takes a frame of one octet");
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, tap, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 8];
    Ok(Prices {
        write: price(|| drop(tap.send(0, &[0]))),
        read: price(|| drop(tap.receive(0, &mut buffer))),
        wait: price(|| {
            // Nothing is what is waited for.
            let _ = epoll::wait(&poll, &mut events[..], Some(&none));
        }),
    })
}

fn price(mut call: impl FnMut()) -> f64 {
    let trial = |_| {
        let began = Instant::now();
        (0..CALLS).for_each(|_| call());
        began.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    (0..TRIALS).map(trial).fold(f64::INFINITY, f64::min)
}
