//! Measures the cost of the generator's own system calls.
//!
//! A guest's `write` to its tap does work for the host: it makes the packet, runs XDP or the bridge, and often the
//! server's softirq. The storm measures that work. The generator's own share is only the cost of a call that does
//! nothing: a `write` that is refused for its length, a `read` that finds no frame, a wait without events. These prices
//! are lower bounds and the same for every subject, so they favour none.

use super::plan::Prices;
use anyhow::{Result, ensure};
use rustix::event::epoll;
use std::time::Instant;
use support::tap::Tap;

/// Calls of one kind in a trial, and number of trials. The cheapest trial counts, because other work on the machine can
/// only add to the cost.
const CALLS: u32 = 20_000;
const TRIALS: u32 = 7;

/// Measures the prices on a tap that has no frames to read.
pub(super) fn prices(tap: &Tap) -> Result<Prices> {
    let mut buffer = [0; 2_048];
    while tap.receive(0, &mut buffer)?.is_some() {}
    // A tap refuses frames shorter than its own header and Ethernet's (Linux: drivers/net/tun.c).
    ensure!(tap.send(0, &[0]).is_err(), "the tap accepts a frame of one octet");
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, tap, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 8];
    Ok(Prices {
        write: price(|| drop(tap.send(0, &[0]))),
        read: price(|| drop(tap.receive(0, &mut buffer))),
        wait: price(|| {
            // The wait returns at once without events.
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
