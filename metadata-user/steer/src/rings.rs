//! Rings that bring frames of quiet guests in other namespaces to a hub's worker.
//!
//! A classifier cannot redirect a frame out of its namespace. `port_tcx` behind the stubs (`stubs`) therefore calls
//! `ring`, of which each hub has an instance with its own BPF ring buffer. The worker reads frames from the ring as
//! it does from the AF_XDP sockets. Answers leave through the hub tap.
//!
//! The buffer belongs to the agent. If the agent is killed, guests' frames fill the buffer; further frames are
//! dropped and counted, so ports stay closed. The next agent replaces the buffer.

use aya::Ebpf;
use aya::maps::{MapData, RingBuf};
use metadata_common::maps::{RING_HEADER, name, program};
use std::os::fd::{AsFd, BorrowedFd};

use super::tables::MapHandles;
use super::{HUBS_OF_A_SIDE, SteerError, Steering, loading, tables};
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::FrameSource;

/// The reading end of a hub's ring. It has one owner.
pub struct Ring {
    buffer: RingBuf<MapData>,
    stats: SocketStats,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

/// The frame in a record; `None` for a record that `ring` has not written.
fn frame_in(record: &[u8]) -> Option<&[u8]> {
    let (length, rest) = record.split_first_chunk::<RING_HEADER>()?;
    rest.get(..usize::try_from(u64::from_ne_bytes(*length)).ok()?)
}

impl FrameSource for Ring {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let mut lent = 0;
        while lent < max {
            let Some(record) = self.buffer.next() else { break };
            // An empty frame is a runt, which the link drops and counts.
            let frame = frame_in(&record).unwrap_or_default();
            lent += 1;
            self.stats.frames += 1;
            self.stats.bytes += frame.len() as u64;
            f(&[frame]);
        }
        lent
    }

    /// The kernel side counts frames without room (`ring_drop_full`).
    fn stats(&self) -> Option<SocketStats> {
        Some(self.stats)
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffer.as_fd()
    }
}

/// Makes the ring of a hub from the hub's instance of the object, and enters it for `port_tcx`.
pub(super) fn put(ebpf: &mut Ebpf, tables: &mut MapHandles, hub: u32) -> Result<Ring, SteerError> {
    let ring = Ring { buffer: tables::take(ebpf, name::RING)?, stats: SocketStats::default() };
    let loaded = loading::load_classifier(ebpf, program::RING)?;
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
        SteerError::map(name::RINGS, format!("enter hub {hub}"), source)
    };
    tables.set_ring(hub, loaded.fd().map_err(|error| failed(error.into()))?)?;
    Ok(ring)
}

/// Like [`put`], but logs a failure: on such a kernel, ports in other namespaces keep XDP.
pub(super) fn put_if_possible(ebpf: &mut Ebpf, tables: &mut MapHandles, hub: u32) -> Option<Ring> {
    put(ebpf, tables, hub)
        .inspect_err(|error| tracing::warn!("ports of other namespaces keep XDP: {error}"))
        .ok()
}

impl Steering {
    /// The ring of a hub, for its worker. Returns it once; `None` if the kernel could not provide one.
    pub fn take_ring(&mut self, hub: u32) -> Option<Ring> {
        self.rings.get_mut((hub % HUBS_OF_A_SIDE) as usize).and_then(Option::take)
    }
}

#[cfg(test)]
mod tests {
    use super::frame_in;

    #[test]
    fn a_record_yields_exactly_the_frame_of_its_length() {
        let record = |length: u64, bytes: &[u8]| [&length.to_ne_bytes(), bytes].concat();
        assert_eq!(frame_in(&record(3, b"abcdef")), Some(&b"abc"[..]));
        assert_eq!(frame_in(&record(0, b"abc")), Some(&b""[..]));
        for wrong in [record(4, b"abc"), record(u64::MAX, b"abc"), vec![0; 7], Vec::new()] {
            assert_eq!(frame_in(&wrong), None, "{wrong:?}");
        }
    }
}
