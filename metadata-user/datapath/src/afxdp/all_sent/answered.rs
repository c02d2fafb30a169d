//! One entry of the table of connections that the kernel has answered (`ANSWERED`).

use super::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use metadata_common::maps::AnsweredConnection;

/// An entry as both sides access it: [`AnsweredConnection`] with atomic fields.
#[derive(Debug)]
#[repr(C)]
pub(super) struct AtomicAnswered {
    flow: AtomicU64,
    at_ms: AtomicU32,
    edition: AtomicU32,
    segment: AtomicU16,
    scale: AtomicU16,
    first: AtomicU32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<AtomicAnswered>() == size_of::<AnsweredConnection>());
    assert!(offset_of!(AtomicAnswered, flow) == offset_of!(AnsweredConnection, flow));
    assert!(offset_of!(AtomicAnswered, at_ms) == offset_of!(AnsweredConnection, at_ms));
    assert!(offset_of!(AtomicAnswered, edition) == offset_of!(AnsweredConnection, edition));
    assert!(offset_of!(AtomicAnswered, segment) == offset_of!(AnsweredConnection, segment));
    assert!(offset_of!(AtomicAnswered, scale) == offset_of!(AnsweredConnection, scale));
    assert!(offset_of!(AtomicAnswered, first) == offset_of!(AnsweredConnection, first));
};

impl AtomicAnswered {
    pub(super) fn load(&self) -> AnsweredConnection {
        AnsweredConnection {
            flow: self.flow.load(Ordering::Acquire),
            at_ms: self.at_ms.load(Ordering::Relaxed),
            edition: self.edition.load(Ordering::Relaxed),
            segment: self.segment.load(Ordering::Relaxed),
            scale: self.scale.load(Ordering::Relaxed),
            first: self.first.load(Ordering::Relaxed),
        }
    }
}
