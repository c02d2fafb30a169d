//! The frame under a program: reads and writes the verifier can follow.

use aya_ebpf::programs::XdpContext;
use metadata_common::classify::Reader;

/// A frame between its first octet and its end, as the kernel gave them.
pub(crate) struct Frame {
    start: usize,
    end: usize,
}

impl Frame {
    /// The frame a program was called for.
    #[inline(always)]
    pub(crate) fn new(context: &XdpContext) -> Self {
        Self { start: context.data(), end: context.data_end() }
    }

    /// Address of `N` octets from `offset` on, if the frame holds them.
    ///
    /// Written as the one comparison with the end of the frame the verifier recognises.
    #[inline(always)]
    fn at<const N: usize>(&self, offset: usize) -> Option<*mut [u8; N]> {
        let address = self.start + offset;
        if address + N > self.end { None } else { Some(address as *mut [u8; N]) }
    }

    /// Overwrites `N` octets from `offset` on; false, and nothing written, if the frame ends before that.
    #[inline(always)]
    pub(crate) fn write<const N: usize>(&self, offset: usize, octets: [u8; N]) -> bool {
        let Some(place) = self.at(offset) else {
            return false;
        };
        // SAFETY: `at` has found all N octets inside the frame, which is this program's alone while it
        // runs; octets have no alignment and any value is valid.
        unsafe { place.write(octets) };
        true
    }
}

impl Reader for Frame {
    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let place = self.at(offset)?;
        // SAFETY: as in `write`; nothing else writes to the frame meanwhile.
        Some(unsafe { place.read() })
    }
}
