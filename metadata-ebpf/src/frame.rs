//! The frame under a program: reads and writes the verifier can follow.

use aya_ebpf::programs::{TcContext, XdpContext};
use core::hint::black_box;
use metadata_common::answer::Editor;
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

    /// The first piece of the frame a classifier was called for.
    #[inline(always)]
    pub(crate) fn first_piece(context: &TcContext) -> Self {
        // The context holds both as 32 bits, which the compiler then compares; the verifier learns only from
        // comparing all 64.
        let (start, end) = (black_box(context.data()), black_box(context.data_end()));
        Self { start, end }
    }

    /// The frame between two addresses a program has given.
    #[inline(always)]
    pub(crate) fn between(start: usize, end: usize) -> Self {
        Self { start, end }
    }

    /// Address of the first octet.
    #[inline(always)]
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Address behind the last octet.
    #[inline(always)]
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Address of `N` octets from `offset` on, if the frame holds them.
    ///
    /// Written as the one comparison with the end of the frame the verifier recognises.
    #[inline(always)]
    fn at<const N: usize>(&self, offset: usize) -> Option<*mut [u8; N]> {
        let address = self.start + offset;
        if address + N > self.end { None } else { Some(address as *mut [u8; N]) }
    }

    /// Octets in the frame.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }
}

impl Editor for Frame {
    #[inline(always)]
    fn write<const N: usize>(&mut self, offset: usize, octets: [u8; N]) -> bool {
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
