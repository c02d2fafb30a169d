//! The frame of a program, with reads and writes that the verifier can follow.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::{TcContext, XdpContext};
use core::hint::black_box;
use metadata_common::answer::Editor;
use metadata_common::classify::Reader;
use metadata_common::verdict::Verdict;

/// The index of a verdict, hidden from the verifier and the compiler. The verifier then follows the rest once
/// and not once per verdict. `salt` is any value the verifier does not know.
#[inline(always)]
pub(crate) fn anonymous(verdict: Verdict, salt: u32) -> u32 {
    const MASK: u32 = 0x7f;
    const _: () = assert!(Verdict::COUNT <= MASK);
    let salt = black_box(salt);
    black_box(verdict.index().wrapping_add(salt)).wrapping_sub(salt) & MASK
}

/// A frame, by the addresses of its first byte and its end from the kernel.
pub(crate) struct Frame {
    start: usize,
    end: usize,
    context: Option<*const xdp_md>,
}

impl Frame {
    /// The frame of an XDP program.
    #[inline(always)]
    pub(crate) fn new(context: &XdpContext) -> Self {
        Self { start: context.data(), end: context.data_end(), context: Some(context.ctx) }
    }

    /// The frame, read from the context again. The verifier then forgets the bounds it has proved, which
    /// differ from path to path, and follows the rest once.
    #[inline(always)]
    pub(crate) fn anew(context: &XdpContext) -> Self {
        Self::new(&XdpContext::new(black_box(context.ctx)))
    }

    /// The linear part of a classifier's frame.
    #[inline(always)]
    pub(crate) fn first_piece(context: &TcContext) -> Self {
        // The context has both addresses as 32 bits, which the compiler would compare. The verifier derives
        // bounds only from a comparison of 64 bits.
        let (start, end) = (black_box(context.data()), black_box(context.data_end()));
        Self { start, end, context: None }
    }

    /// The frame between two addresses from another function of the program.
    #[inline(always)]
    pub(crate) fn between(start: usize, end: usize) -> Self {
        Self { start, end, context: None }
    }

    /// The address of the first byte.
    #[inline(always)]
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// The address after the last byte.
    #[inline(always)]
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// The address of `N` bytes at `offset`, if the frame contains them.
    ///
    /// The code is the only form of comparison with the end of the frame that the verifier recognises.
    #[inline(always)]
    fn at<const N: usize>(&self, offset: usize) -> Option<*mut [u8; N]> {
        let address = self.start + offset;
        if address + N > self.end { None } else { Some(address as *mut [u8; N]) }
    }

    /// Length of the frame in bytes.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }
}

impl Editor for Frame {
    #[inline(always)]
    fn write<const N: usize>(&mut self, offset: usize, bytes: [u8; N]) -> bool {
        let Some(place) = self.at(offset) else {
            return false;
        };
        // SAFETY: `at` has found all N bytes inside the frame, which is this program's alone while it
        // runs; bytes have no alignment and any value is valid.
        unsafe { place.write(bytes) };
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

    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let Some(context) = self.context else {
            return self.read(offset);
        };
        // The pointers are read again. Otherwise the compiler would merge the comparisons of several reads.
        // SAFETY: the kernel gave this pointer to a live context; nothing writes to it meanwhile.
        let context = unsafe { &*context };
        // SAFETY: a reference to one aligned u32.
        let start = unsafe { (&raw const context.data).read_volatile() } as usize;
        // SAFETY: as above.
        let end = unsafe { (&raw const context.data_end).read_volatile() } as usize;
        Self { start, end, context: None }.read(offset)
    }
}
