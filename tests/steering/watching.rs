//! Reports from the kernel: devices that appear and disappear, and the log lines of the programs.

use crate::node::{ALICE, Node, ask, port};
use metadata_common::port::PortName;
use metadata_links::devices::Changed;
use metadata_links::devices::DeviceEvent;
use metadata_links::devices::LinkWatch;
use metadata_steer::{DeviceLookup, exists};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::netns::Namespace;
use support::privileged;
use support::tap::{Shape, Tap};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(5);
/// Wait after which something counts as not happening.
const MOMENT: Duration = Duration::from_millis(100);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

async fn quiet(watch: &mut LinkWatch) {
    // A new device keeps changing for a moment (carrier, queueing).
    while timeout(MOMENT, watch.changed()).await.is_ok() {}
}

/// Collects the devices that a watch reports until no change follows for [`MOMENT`].
async fn devices(watch: &mut LinkWatch) -> Vec<DeviceEvent> {
    let mut all = Vec::new();
    while let Ok(changed) = timeout(MOMENT, watch.changed()).await {
        match changed.expect("the watch does not end") {
            Changed::Devices(devices) => all.extend(devices),
            Changed::Unknown => panic!("the watch lost changes"),
        }
    }
    all
}

#[test]
fn a_created_changed_or_deleted_device_is_reported() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("watch").expect("a namespace");
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(ns.name())).expect("a watch");
        for change in ["link add tap0 type bridge", "link set tap0 up", "link del tap0"] {
            ns.ip(change).expect("a change");
            let changed = timeout(PATIENCE, watch.changed()).await;
            assert!(matches!(changed, Ok(Ok(_))), "{change}: {changed:?}");
            quiet(&mut watch).await;
        }
    });
}

#[test]
fn a_recreated_tap_of_the_same_name_and_index_is_another_device() {
    const IFINDEX: u32 = 4_711;
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let make = || Tap::create_at(&node.ns, "tap0", Shape::default(), IFINDEX).expect("a tap");
    let name = PortName::local("tap0");
    let mut taps = vec![make()];
    node.steering.attach(&name).expect("attached");
    for closed in [false, true] {
        // A bridge reports a device that leaves it as removed, but the device still exists.
        let (bridged, recreated) = runtime().block_on(async {
            let mut watch = LinkWatch::open(Some(node.ns.name())).expect("a watch");
            node.ns.ip_batch("link add br0 type bridge\nlink set tap0 master br0\n").expect("a bridge");
            node.ns.ip_batch("link set tap0 nomaster\nlink del br0\n").expect("no bridge");
            let bridged = devices(&mut watch).await;
            node.ns.ip("link del tap0").expect("the tap is deleted");
            taps.push(make());
            (bridged, devices(&mut watch).await)
        });
        bridged.iter().for_each(|device| node.steering.attachments_mut().mark_deleted(device));
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Attached
        );
        recreated.iter().for_each(|device| node.steering.attachments_mut().mark_deleted(device));
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Other
        );
        let attached = if closed { node.steering.attach_closed(&name) } else { node.steering.attach(&name) };
        attached.expect("the new one is attached");
        assert_eq!(
            node.ns.run_in(|| node.steering.attachments().find(&name)).expect("a look-up"),
            DeviceLookup::Attached
        );
        let shown = node.ns.ip("link show tap0").expect("the tap");
        assert!(shown.contains("xdp"), "{shown}");
    }
}

#[test]
fn devices_of_another_namespace_are_not_reported() {
    if !privileged::or_skip() {
        return;
    }
    let [watched, other] = [0, 1].map(|_| Namespace::new("watch").expect("a namespace"));
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(watched.name())).expect("a watch");
        quiet(&mut watch).await;
        other.ip("link add tap0 type bridge").expect("a change");
        assert!(timeout(MOMENT, watch.changed()).await.is_err());
    });
}

#[test]
fn the_watch_reports_changes_during_and_after_a_storm_of_changes() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("watch").expect("a namespace");
    // The kernel reports changes only of devices that are up.
    ns.ip_batch("link add br0 type bridge\nlink set br0 up\n").expect("a device");
    // This is far more than the socket holds and than one read takes.
    let storm: String = (0..2_000).map(|n| format!("link set br0 alias a{n}\n")).collect();
    runtime().block_on(async {
        let mut watch = LinkWatch::open(Some(ns.name())).expect("a watch");
        ns.ip_batch(&storm).expect("a storm");
        assert!(matches!(timeout(PATIENCE, watch.changed()).await, Ok(Ok(_))));
        quiet(&mut watch).await;
        ns.ip("link add tap0 type bridge").expect("a change");
        assert!(matches!(timeout(PATIENCE, watch.changed()).await, Ok(Ok(_))), "no report after the storm");
    });
}

#[test]
fn a_port_exists_only_in_the_namespace_of_its_device() {
    if !privileged::or_skip() {
        return;
    }
    let ns = Namespace::new("watch").expect("a namespace");
    ns.ip("link add tap0 index 4242 type bridge").expect("a device");
    let by_name = PortName { ifname: "tap0".into(), netns: Some(ns.name().into()) };
    let by_path = PortName { netns: Some(ns.path().display().to_string()), ..by_name.clone() };
    let local = PortName::local("tap0");
    let missing = PortName { netns: Some("no-such-namespace".into()), ..by_name.clone() };
    for (port, index) in [(&by_name, Some(4242)), (&by_path, Some(4242)), (&missing, None)] {
        assert_eq!(exists(port).expect("a look-up"), index, "{port}");
    }
    assert_eq!(ns.run_in(|| exists(&local)).expect("a look-up"), Some(4242));
    assert_eq!(exists(&local).expect("a look-up"), None, "the test's own namespace has no such device");
}

/// Collects the lines of a subscriber.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl io::Write for Printed {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("not poisoned").write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_log_line_of_the_kernel_programs_becomes_a_tracing_event() {
    if !privileged::or_skip() {
        return;
    }
    let mut node = Node::start();
    let (tap, name) = port(&node.ns, "tap0", &node.ns);
    node.steering.attach(&name).expect("attached");
    let printed = Printed::default();
    let writer = printed.clone();
    // The agent itself names the record of such a guest, so the programs' line is of the level debug.
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
    let subscriber = subscriber.with_writer(move || writer.clone()).finish();
    // This sets the subscriber for this thread only, on which the runtime also runs its tasks.
    let _guard = tracing::subscriber::set_default(subscriber);
    let found = runtime().block_on(async {
        node.steering.reports_mut().forward_logs();
        ask(&tap, ALICE);
        let found = async {
            loop {
                let text = String::from_utf8_lossy(&printed.0.lock().expect("not poisoned")).into_owned();
                if text.contains("not registered") {
                    return text;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, found).await
    });
    let text = found.expect("the line about an unregistered guest");
    assert!(text.contains("DEBUG") && text.contains("52:54:00:00:00:a1"), "{text}");
}
