//! Priority tags of frames from guests: removed before `port` decides, and put back for frames that pass.
//!
//! With the tag gone, every later step finds each header at its usual place. Answers go out without a tag. A classifier's
//! frames have no such tag in their bytes: the kernel has moved it to the buffer's metadata.

use aya_ebpf::helpers::generated::bpf_xdp_adjust_head;
use aya_ebpf::programs::XdpContext;
use core::hint::black_box;
use metadata_common::answer::Editor as _;
use metadata_common::classify::{Reader as _, priority_tag};
use metadata_common::wire::ethernet;

use crate::frame::Frame;

/// Both addresses.
const MACS: usize = ethernet::TYPE;
/// No tag has this type and content.
const FAILED: u32 = u32::MAX;

/// Removes the priority tag, and returns its type and content; 0 if there is none. `salt` is any value that the verifier
/// does not know. `None` if the frame is unusable afterwards, which does not happen.
#[inline(always)]
pub(crate) fn take(context: &XdpContext, salt: u32) -> Option<u32> {
    let tag = match priority_tag(&Frame::new(context)) {
        Some(tag) => remove(context, u32::from_be_bytes(tag)),
        None => 0,
    };
    if tag == FAILED {
        return None;
    }
    // Otherwise the verifier would follow the rest of the program once without and once with a tag.
    let salt = black_box(salt);
    Some(black_box(tag.wrapping_add(salt)).wrapping_sub(salt))
}

#[inline(never)]
fn remove(context: &XdpContext, tag: u32) -> u32 {
    let mut frame = Frame::anew(context);
    // The kernel leaves at least an Ethernet header in a frame.
    if frame.read::<{ ethernet::HEADER + ethernet::TAG - MACS }>(MACS).is_none() {
        return 0;
    }
    let Some(macs) = frame.read::<MACS>(0) else {
        return 0;
    };
    if !frame.write(ethernet::TAG, macs) {
        return 0;
    }
    // SAFETY: the context belongs to this run; what was derived from it is not used after this.
    let rc = unsafe { bpf_xdp_adjust_head(context.ctx, ethernet::TAG as i32) };
    if rc == 0 { tag } else { FAILED }
}

/// Puts a tag back. Returns false if the frame is unusable afterwards, which does not happen.
#[inline(never)]
pub(crate) fn put_back(context: &XdpContext, tag: u32) -> bool {
    // SAFETY: the context belongs to this run; what was derived from it is not used after this.
    if unsafe { bpf_xdp_adjust_head(context.ctx, -(ethernet::TAG as i32)) } != 0 {
        return false;
    }
    let mut frame = Frame::anew(context);
    let Some(macs) = frame.read::<MACS>(ethernet::TAG) else {
        return false;
    };
    frame.write(0, macs) && frame.write(ethernet::TYPE, tag.to_be_bytes())
}
