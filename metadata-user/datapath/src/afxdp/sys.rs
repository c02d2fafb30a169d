//! Memory shared with the kernel: mapped here, unmapped on drop, accessed only through checked addresses.
//!
//! ABI names are the kernel's (`include/uapi/linux/if_xdp.h`, v6.12:
//! <https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/if_xdp.h>). Constants, structs and socket options
//! come from `rustix::net::xdp`, so only the mapping itself is unsafe here.
#![expect(unsafe_code, reason = "mapping memory has no safe form")]

use rustix::io::Errno;
#[cfg(not(miri))]
use rustix::mm::mmap_anonymous;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

/// A mapping that is unmapped on drop. It is never a slice, because the kernel writes to it too. References are made
/// only to memory that we own at that moment (`umem`) or to atomics (`ring`).
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Process memory in place of a mapping, for models of the kernel's side.
    #[cfg(any(test, miri, feature = "model"))]
    plain: Option<std::sync::Arc<plain::Memory>>,
}

// SAFETY: a mapping belongs to the process, not to the thread that made it, and this type provides only addresses.
// Its two users, `ring` and `umem`, own it and decide when to access them.
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

#[cfg(test)]
mod tests {
    use super::Mapping;

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
}
