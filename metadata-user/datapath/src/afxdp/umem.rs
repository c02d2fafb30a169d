//! The frame memory (UMEM): one region of chunks of equal size, and a table of who owns each.
//!
//! A chunk we own is a [`UmemFrame`], a value that cannot be copied. Giving it to the kernel consumes it. The only way
//! to get a frame is a descriptor from the kernel, for a chunk that the kernel really owns. So a slice of a frame can
//! exist only while we own the frame.
#![expect(unsafe_code, reason = "slices over memory shared with the kernel")]

use rustix::io::Errno;
use rustix::net::xdp::{XdpDesc, XdpDescOptions};

use super::sys::Mapping;

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
        unsafe { at.copy_from_nonoverlapping(std::ptr::NonNull::from(bytes).cast(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::Umem;
    use rustix::net::xdp::{XdpDesc, XdpDescOptions};

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
