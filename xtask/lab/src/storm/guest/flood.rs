//! The flooding guest. It sends as fast as a core can: SYNs to the metadata address, or as many frames to others.

use super::plan::{Flood, Planned};
use super::tally::Flooded;
use super::wire::{self, Ends, Header, SYN};
use anyhow::Result;
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use support::tap::{Tap, VNET_HDR_LEN};

/// Frames between two checks of the stop flag.
const BURST: usize = 256;
/// The destination MAC of ordinary frames, which no device has.
const NOBODY: Mac = Mac([0x02, 0, 0, 0xff, 0xff, 0xff]);
/// An address for documentation (RFC 5737).
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Floods until `stop` is set.
pub(super) fn run(
    tap: &Tap,
    guest: &Planned,
    server: Ipv4Addr,
    flood: Flood,
    stop: &AtomicBool,
) -> Result<Flooded> {
    let began = Instant::now();
    let mut done = Flooded::default();
    let mut frames = frames(tap, guest, server, flood);
    while !stop.load(Ordering::Relaxed) {
        for frame in frames.iter_mut() {
            done.frames += u64::from(tap.send(0, frame).unwrap_or(false));
        }
    }
    done.wall_us = began.elapsed().as_micros() as f64;
    done.cpu_us = thread_cpu_us()?;
    Ok(done)
}

/// Makes SYNs from different ports.
fn frames(tap: &Tap, guest: &Planned, server: Ipv4Addr, flood: Flood) -> Vec<Vec<u8>> {
    let (server, server_mac) = match flood {
        // Any MAC reaches the service, because frames are steered by their destination address.
        Flood::Syn => (server, Mac([0x02, 0, 0xa9, 0xfe, 0, 0])),
        Flood::Ordinary => (ELSEWHERE, NOBODY),
    };
    let ends = Ends { mac: guest.mac(), address: guest.address, server, server_mac };
    (0..BURST as u16)
        .map(|n| {
            let mut frame = vec![0; if tap.shape().vnet_hdr { VNET_HDR_LEN } else { 0 }];
            let port = 1_024 + n;
            let header =
                Header { port, seq: 1, ack: 0, flags: SYN, window: 64_240, timestamps: Some((1, 0)) };
            wire::segment(&mut frame, &ends, &header, &[], &[], false);
            frame
        })
        .collect()
}

/// Returns the CPU time of the calling thread in microseconds, exact where /proc's ticks are not (Linux:
/// Documentation/scheduler/sched-stats.rst).
fn thread_cpu_us() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns: u64 = text.split_whitespace().next().unwrap_or("0").parse()?;
    Ok(ns as f64 / 1e3)
}
