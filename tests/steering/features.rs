//! What the agent learns by asking the kernel agrees with what the kernel then does.

use metadata_steer::probe::{Feature, features, missing_helpers};
use metadata_steer::{SteerConfig, SteeringMode, SteeringProgram};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities, unshare_unsafe};
use support::netns::Namespace;
use support::{empty_classifier, privileged};

use crate::node::{Node, config, port};

/// The index of the loopback, the only device of a new namespace.
const LOOPBACK: u32 = 1;

fn has(feature: Feature) -> bool {
    let found = features().into_iter().find(|(of, _)| *of == feature).expect("each feature is listed").1;
    found.unwrap_or_else(|failure| panic!("{feature:?}: {failure}"))
}

#[test]
fn the_kernel_attaches_a_classifier_exactly_if_it_is_found_to_have_tcx() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("features").expect("a namespace");
    let attached = ns.run_in(|| empty_classifier::attach(LOOPBACK).map(drop));
    assert_eq!(has(Feature::Tcx), attached.is_ok(), "{attached:?}");
}

#[test]
fn another_classifier_on_the_loopback_does_not_change_the_answer() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("features").expect("a namespace");
    ns.run_in(|| {
        let before = has(Feature::Tcx);
        let _link = empty_classifier::attach(LOOPBACK).ok();
        assert_eq!(has(Feature::Tcx), before);
    });
}

#[test]
fn steering_uses_what_the_kernel_is_found_to_have() {
    if !privileged::or_skip() {
        return;
    }
    let lacking: Vec<_> = features().into_iter().filter(|(_, answer)| *answer != Ok(true)).collect();
    let mut node = Node::start_with(&SteerConfig { mode: SteeringMode::Auto, ..config() });
    assert_eq!(node.steering.hubs_mut().take_long_tap(0).is_some(), has(Feature::Tcx));
    assert_eq!(node.steering.hubs_mut().take_ring(0).is_some(), has(Feature::Tcx));
    let (_tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    let switched = node.steering.switch(&name, SteeringProgram::Tcx);
    assert_eq!(switched.is_ok(), has(Feature::Tcx), "{switched:?}");
    // It has started, so nothing is missing for which there is no substitute.
    assert!(lacking.iter().all(|(feature, _)| feature.words().without.is_some()), "{lacking:?}");
    assert_eq!(missing_helpers(), Ok(Vec::new()));
}

#[test]
#[expect(unsafe_code, reason = "a thread gets descriptors of its own by unshare(2), which has no safe form")]
fn asking_takes_two_capabilities_and_leaves_nothing_behind() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("features").expect("a namespace");
    let devices = ns.links().expect("a list of devices");
    ns.run_in(|| {
        // SAFETY: this thread uses no descriptor that another thread opens or closes from now on.
        unsafe { unshare_unsafe(UnshareFlags::FILES) }.expect("descriptors of this thread alone");
        let open = || std::fs::read_dir("/proc/thread-self/fd").expect("a list of descriptors").count();
        let before = open();
        let least = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        let sets = CapabilitySets { effective: least, permitted: least, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets).expect("this thread gives up its other capabilities");
        for (feature, answer) in features() {
            match answer {
                // An AF_XDP socket needs CAP_NET_RAW, and a namespace to attach in CAP_SYS_ADMIN.
                Err(failure) if failure.is_refusal() => {
                    let may = [Feature::Socket, Feature::Link, Feature::LinkUpdate];
                    assert!(may.contains(&feature), "{feature:?}: {failure}");
                }
                answer => assert!(answer.is_ok(), "{feature:?}: {answer:?}"),
            }
        }
        assert_eq!(missing_helpers(), Ok(Vec::new()));
        assert_eq!(open(), before);
    });
    assert_eq!(ns.links().expect("a list of devices"), devices);
}
