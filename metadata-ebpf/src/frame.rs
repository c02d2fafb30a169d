//! The frame under a program: reads and writes the verifier can follow.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::{TcContext, XdpContext};
use core::hint::black_box;
use metadata_common::answer::Editor;
use metadata_common::classify::Reader;
use metadata_common::verdict::Verdict;

/// The index of a verdict, which the verifier, and the compiler, no longer know: so that what comes after is followed
/// once and not for each verdict. `salt` is any number the verifier does not know.
#[inline(always)]
pub(crate) fn anonymous(verdict: Verdict, salt: u32) -> u32 {
    const MASK: u32 = 0x7f;
    const _: () = assert!(Verdict::COUNT <= MASK);
    let salt = black_box(salt);
    black_box(verdict.index().wrapping_add(salt)).wrapping_sub(salt) & MASK
}

/// A frame between its first octet and its end, as the kernel gave them.
pub(crate) struct Frame {
    start: usize,
    end: usize,
    context: Option<*const xdp_md>,
}

impl Frame {
    /// The frame a program was called for.
    #[inline(always)]
    pub(crate) fn new(context: &XdpContext) -> Self {
        Self { start: context.data(), end: context.data_end(), context: Some(context.ctx) }
    }

    /// The frame, taken from the context again. The verifier forgets with it how far the frame has been seen to
    /// reach, which else differs from way to way, and follows what comes after once and not once for each.
    #[inline(always)]
    pub(crate) fn anew(context: &XdpContext) -> Self {
        Self::new(&XdpContext::new(black_box(context.ctx)))
    }

    /// The first piece of the frame a classifier was called for.
    #[inline(always)]
    pub(crate) fn first_piece(context: &TcContext) -> Self {
        // The context holds both as 32 bits, which the compiler then compares; the verifier learns only from
        // comparing all 64.
        let (start, end) = (black_box(context.data()), black_box(context.data_end()));
        Self { start, end, context: None }
    }

    /// The frame between two addresses a program has given.
    #[inline(always)]
    pub(crate) fn between(start: usize, end: usize) -> Self {
        Self { start, end, context: None }
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

    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let Some(context) = self.context else {
            return self.read(offset);
        };
        // Not the pointers of other reads, of which the compiler would make one comparison for all.
        // SAFETY: the kernel gave this pointer to a live context; nobody writes to it meanwhile.
        let context = unsafe { &*context };
        // SAFETY: a reference to one aligned u32.
        let start = unsafe { (&raw const context.data).read_volatile() } as usize;
        // SAFETY: as above.
        let end = unsafe { (&raw const context.data_end).read_volatile() } as usize;
        Self { start, end, context: None }.read(offset)
    }
}
