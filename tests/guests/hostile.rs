//! Each frame of a hostile guest gets the expected verdict and only the expected answers. No frame that a node would
//! deliver to a served address reaches the bridge, and the other guests stay served.

mod ethernet;
mod identity;
mod ipv4;
mod ipv6;
mod leaks;
mod make;
mod node;
mod offloads;
mod segments;

use support::arena::{self, Arena, Case, Scene};
use support::books;
use support::privileged;
use support::seed::seed;
use support::tap::Shape;

/// The two ways to steer ports.
const MODES: [&str; 2] = ["steer: xdp\n", "steer: tcx\n"];

/// Runs every case on taps of these shapes, in both modes, then checks that every frame is accounted for. `more` is
/// the number of frames per mode that reach the agent beyond those steered ([`books::balance`]).
fn run_cases(label: &str, shapes: &[Shape], cases: &[Case], more: [i64; 2]) {
    let seed = seed();
    fastrand::seed(seed);
    for shape in shapes {
        for (mode, more) in MODES.into_iter().zip(more) {
            let scene = Scene::new(*shape).expect("a node");
            let mut arena = Arena::open(&scene, mode).expect("an arena");
            let label = format!("{label}, {}, {shape:?}", mode.trim());
            arena::run_all(&mut arena, &label, seed, cases);
            arena.others_are_served().unwrap_or_else(|error| panic!("{label}: {error:#}"));
            books::balance(&arena.agent, more).unwrap_or_else(|error| panic!("{label}: {error:#}"));
        }
    }
}

#[test]
fn no_ipv4_packet_for_a_served_address_leaves_the_tap() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("ipv4", &[Shape::default(), Shape::virtio()], &ipv4::cases(), [0; 2]);
}

#[test]
fn no_ipv6_packet_for_a_served_address_leaves_the_tap() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("ipv6", &[Shape::default(), Shape::virtio()], &ipv6::cases(), [0; 2]);
}

#[test]
fn no_ethernet_encapsulation_gets_a_packet_for_a_served_address_off_the_tap() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("ethernet", &[Shape::default(), Shape::virtio()], &ethernet::cases(), [0; 2]);
}

#[test]
fn no_detour_reaches_a_served_address_and_no_claim_to_one_leaves_the_tap() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("leaks", &[Shape::default(), Shape::virtio()], &leaks::cases(), [0; 2]);
}

#[test]
fn no_odd_segment_gets_more_than_a_reset() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("segments", &[Shape::default()], &segments::cases(), [0; 2]);
}

#[test]
fn no_guest_offload_gets_a_frame_past_the_policy() {
    if !privileged::or_skip() {
        return;
    }
    run_cases("offloads", &[Shape::virtio()], &offloads::cases(), offloads::MORE);
}

#[test]
fn only_the_ports_own_mac_is_served() {
    if !privileged::or_skip() {
        return;
    }
    let queues = Shape { queues: 3, vnet_hdr: true };
    run_cases("identity", &[Shape::default()], &identity::cases(), [0; 2]);
    run_cases("identity", &[queues], &identity::on_queues(queues.queues), [0; 2]);
}
