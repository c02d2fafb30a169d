//! Memory shared with the kernel: mapped here, unmapped on drop, accessed only through checked addresses.
//!
//! ABI names are the kernel's (`include/uapi/linux/if_xdp.h`, v6.12:
//! <https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/if_xdp.h>). Constants, structs and socket options
//! come from `rustix::net::xdp`, so only the mapping itself and slices of it are unsafe here.
#![expect(
    unsafe_code,
    reason = "mapping memory, and slices over memory shared with the kernel, have no safe form"
)]

use rustix::io::Errno;
#[cfg(not(miri))]
use rustix::mm::mmap_anonymous;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{XdpDesc, XdpDescOptions};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

/// A mapping that is unmapped on drop. It is never a slice, because the kernel writes to it too. References are made
/// only to memory that we own at that moment ([`Umem`]) or to atomics (`ring`).
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Process memory in place of a mapping, for models of the kernel's side.
    #[cfg(any(test, miri, feature = "model"))]
    plain: Option<std::sync::Arc<plain::Memory>>,
}

// SAFETY: a mapping belongs to the process, not to the thread that made it, and this type provides only addresses.
// Its two users, `ring` and [`Umem`], own it and decide when to access them.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes of zeroed memory, resident from the start so that no frame waits for a page fault.
    #[cfg(not(miri))]
    pub(super) fn anonymous(len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: without MAP_FIXED the kernel picks unused addresses; no existing memory is touched.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        Self::new(base, len)
    }

    /// Provides process memory under Miri, which does not support this mapping.
    #[cfg(miri)]
    pub(super) fn anonymous(len: usize) -> Result<Self, Errno> {
        let [memory, _] = Self::plain(len);
        Ok(memory)
    }

    /// Maps `len` bytes of `fd` at `offset`, shared with the kernel.
    pub(super) fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: without MAP_FIXED the kernel picks unused addresses; no existing memory is touched.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, flags, fd, offset) }?;
        Self::new(base, len)
    }

    fn new(base: *mut c_void, len: usize) -> Result<Self, Errno> {
        let base = NonNull::new(base.cast()).ok_or(Errno::FAULT)?;
        Ok(Self {
            base,
            len,
            #[cfg(any(test, miri, feature = "model"))]
            plain: None,
        })
    }

    /// Two handles to the same `len` bytes of zeroed process memory, one for each side.
    #[cfg(any(test, miri, feature = "model"))]
    pub(super) fn plain(len: usize) -> [Self; 2] {
        let memory = std::sync::Arc::new(plain::Memory::zeroed(len));
        [0; 2].map(|_| Self { base: memory.base(), len, plain: Some(std::sync::Arc::clone(&memory)) })
    }

    /// Bytes in the mapping.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The ring cursor at `offset`, for the code that sets up the kernel's side.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn cursor(&self, offset: u64) -> Option<&std::sync::atomic::AtomicU32> {
        let cursor = self.at(offset, 1)?;
        // SAFETY: aligned and inside the mapping, which lives as long as `self`; both sides access cursors only with
        // atomic operations.
        Some(unsafe { cursor.as_ref() })
    }

    /// The mapping's address, for registration with the kernel.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// The address of `count` values of `T` at `offset`; `None` unless all of them lie inside and are aligned.
    pub(super) fn at<T>(&self, offset: u64, count: usize) -> Option<NonNull<T>> {
        let offset = usize::try_from(offset).ok()?;
        let end = size_of::<T>().checked_mul(count)?.checked_add(offset)?;
        if end > self.len {
            return None;
        }
        // SAFETY: `offset` is at most `len` (checked above), so the result is within the mapping or one past its end.
        let at = unsafe { self.base.add(offset) }.cast::<T>();
        at.is_aligned().then_some(at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(any(test, miri, feature = "model"))]
        if self.plain.is_some() {
            return;
        }
        // SAFETY: base and length are those of the mapping made in the constructor, which no one else unmaps. The
        // owner of `self` is gone, so no address is used any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Process memory that models of the kernel's side share instead of mappings.
#[cfg(any(test, miri, feature = "model"))]
mod plain {
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
    use std::ptr::NonNull;

    /// A page, the alignment of a mapping.
    const ALIGNMENT: usize = 4096;

    /// Zeroed memory, freed on drop.
    #[derive(Debug)]
    pub(super) struct Memory {
        base: NonNull<u8>,
        layout: Layout,
    }

    // SAFETY: memory belongs to the process, not to a thread, and this type provides only its address. The users of
    // the two mappings decide when to access it, as with memory that the kernel maps.
    unsafe impl Send for Memory {}
    // SAFETY: nothing is read or written through `&self`.
    unsafe impl Sync for Memory {}

    impl Memory {
        pub(super) fn zeroed(len: usize) -> Self {
            let layout = Layout::from_size_align(len.max(1), ALIGNMENT).expect("a length memory can have");
            // SAFETY: the layout has a size above 0.
            let base = unsafe { alloc_zeroed(layout) };
            let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
            Self { base, layout }
        }

        pub(super) fn base(&self) -> NonNull<u8> {
            self.base
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: `zeroed` allocated it with this layout, and its last user is gone with `self`.
            unsafe { dealloc(self.base.as_ptr(), self.layout) };
        }
    }
}

// The frame memory (UMEM): one region of chunks of equal size, and a table of who owns each.
//
// A chunk we own is a [`UmemFrame`], a value that cannot be copied. Giving it to the kernel consumes it. The only way
// to get a frame is a descriptor from the kernel, for a chunk that the kernel really owns. So a slice of a frame can
// exist only while we own the frame.

/// A chunk we own, and the part of it that holds a frame. Only one [`Umem`] creates and takes it back: both live
/// inside one `Receiver` and do not leave it.
#[derive(Debug)]
pub(super) struct UmemFrame {
    chunk: u32,
    /// The frame's offset within its chunk; the kernel leaves headroom before it.
    start: u32,
    /// The length from the kernel; checked when a slice is made.
    len: u32,
}

/// The region, and the owner of every chunk.
#[derive(Debug)]
pub(super) struct Umem {
    /// True for each chunk that the kernel owns: in the fill ring, in its own list, or in the RX ring.
    with_kernel: Box<[bool]>,
    chunk_size: u32,
    memory: Mapping,
}

impl Umem {
    /// Maps `chunks` × `chunk_size` bytes. Also returns all chunks as frames that we own.
    pub(super) fn new(chunks: u32, chunk_size: u32) -> Result<(Self, Vec<UmemFrame>), Errno> {
        let len = (chunks as usize).checked_mul(chunk_size as usize).ok_or(Errno::NOMEM)?;
        let memory = Mapping::anonymous(len)?;
        let with_kernel = vec![false; chunks as usize].into_boxed_slice();
        let frames = (0..chunks).map(|chunk| UmemFrame { chunk, start: 0, len: 0 }).collect();
        Ok((Self { with_kernel, chunk_size, memory }, frames))
    }

    /// The region's address, for registration with the kernel.
    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Bytes in the region.
    pub(super) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Gives a chunk to the kernel; returns the address for the fill ring.
    pub(super) fn give(&mut self, frame: UmemFrame) -> u64 {
        if let Some(holder) = self.with_kernel.get_mut(frame.chunk as usize) {
            *holder = true;
        }
        u64::from(frame.chunk) * u64::from(self.chunk_size)
    }

    /// Takes back the chunk that a descriptor names.
    ///
    /// Returns `None` if it is not a chunk of this region, or the kernel does not own it: that would create a second
    /// frame for one chunk.
    pub(super) fn take(&mut self, descriptor: XdpDesc) -> Option<UmemFrame> {
        let size = u64::from(self.chunk_size);
        let chunk = u32::try_from(descriptor.addr / size).ok()?;
        let holder = self.with_kernel.get_mut(chunk as usize)?;
        if !std::mem::replace(holder, false) {
            return None;
        }
        // Only XDP_USE_SG, which we do not set, allows frames in several chunks. A part of one has no readable
        // bytes.
        let whole = !descriptor.options.contains(XdpDescOptions::XDP_PKT_CONTD);
        let len = if whole { descriptor.len } else { u32::MAX };
        // Lossless: the remainder of a division by a u32.
        Some(UmemFrame { chunk, start: (descriptor.addr % size) as u32, len })
    }

    /// The bytes of a frame; `None` if the kernel's length exceeds the chunk.
    pub(super) fn bytes(&self, frame: &UmemFrame) -> Option<&[u8]> {
        if frame.start.checked_add(frame.len)? > self.chunk_size {
            return None;
        }
        let offset = u64::from(frame.chunk) * u64::from(self.chunk_size) + u64::from(frame.start);
        let at = self.memory.at::<u8>(offset, frame.len as usize)?;
        // SAFETY: `at` checks that all `len` bytes lie inside the mapping, which outlives `&self`; they were zeroed
        // when mapped, so they are initialised. They lie in one chunk (checked above), whose `UmemFrame` we hold. The
        // kernel writes to a chunk only between `give` and the descriptor that `take` accepts. `give` needs `&mut
        // self`, so no slice from here is alive then.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), frame.len as usize) })
    }

    /// The chunks that the kernel owns.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn with_kernel(&self) -> impl Iterator<Item = u32> {
        (0u32..).zip(&self.with_kernel).filter_map(|(chunk, held)| held.then_some(chunk))
    }

    /// Writes into a chunk that the kernel owns, as the kernel would.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn write_as_kernel(&mut self, addr: u64, bytes: &[u8]) {
        assert!(self.with_kernel[usize::try_from(addr).expect("an index") / self.chunk_size as usize]);
        let at = self.memory.at::<u8>(addr, bytes.len()).expect("inside the region");
        // SAFETY: `at` has room for all bytes, and `&mut self` rules out any slice into the region.
        unsafe { at.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::xdp::{XdpDesc, XdpDescOptions};

    use super::{Mapping, Umem};

    #[test]
    fn only_aligned_values_entirely_inside_have_an_address() {
        let mapping = Mapping::anonymous(4096).expect("a page");
        for (offset, count, inside) in [
            (0, 512, true),
            (0, 513, false),
            (4088, 1, true),
            (4096, 0, true),
            (4096, 1, false),
            (4, 1, false),
            (u64::MAX, 1, false),
            (8, usize::MAX, false),
        ] {
            assert_eq!(mapping.at::<u64>(offset, count).is_some(), inside, "{count} from {offset}");
        }
    }

    const CHUNK: u32 = 2048;
    const CHUNKS: u32 = 4;

    /// A region in which the kernel owns all chunks but the last.
    fn umem() -> Umem {
        let (mut umem, mut frames) = Umem::new(CHUNKS, CHUNK).expect("four chunks");
        frames.pop();
        for frame in frames {
            umem.give(frame);
        }
        umem
    }

    fn descriptor(addr: u64, len: u32) -> XdpDesc {
        XdpDesc { addr, len, options: XdpDescOptions::empty() }
    }

    #[test]
    fn a_frame_may_fill_its_chunk_to_the_last_byte() {
        let mut umem = umem();
        umem.write_as_kernel(2048 + 256, &[7; 1792]);
        let frame = umem.take(descriptor(2048 + 256, 1792)).expect("the kernel owns the chunk");
        assert_eq!(umem.bytes(&frame), Some(&[7; 1792][..]));
    }

    #[test]
    fn a_length_that_exceeds_the_chunk_gives_no_bytes() {
        for (addr, len) in [(256, 1793), (2047, 2), (0, CHUNK + 1), (4096, u32::MAX), (4097, u32::MAX)] {
            let mut umem = umem();
            let frame = umem.take(descriptor(addr, len)).expect("the kernel owns the chunk");
            assert_eq!(umem.bytes(&frame), None, "{len} bytes at {addr}");
        }
    }

    #[test]
    fn a_chunk_the_kernel_does_not_own_is_not_taken() {
        let outside = u64::from(CHUNK * CHUNKS);
        for addr in [3 * 2048, outside, outside + 1, u64::from(u32::MAX) * 2048, 1 << 48, u64::MAX] {
            assert!(umem().take(descriptor(addr, 60)).is_none(), "{addr}");
        }
    }

    #[test]
    fn a_chunk_is_taken_once() {
        let mut umem = umem();
        assert!(umem.take(descriptor(256, 60)).is_some());
        assert!(umem.take(descriptor(256, 60)).is_none());
    }

    #[test]
    fn a_part_of_a_frame_in_several_chunks_gives_no_bytes() {
        let mut umem = umem();
        let part = XdpDesc { addr: 256, len: 60, options: XdpDescOptions::XDP_PKT_CONTD };
        let frame = umem.take(part).expect("the kernel owns the chunk");
        assert_eq!(umem.bytes(&frame), None);
    }
}
