//! What the agents of two releases share in the kernel changes only with [`PINS_VERSION`].

use metadata_common::maps::{AllSent, Guest, Identity, IdentityKey, InheritedState, Port, PortKey, name};
use metadata_links::netns::Cookie;
use std::fmt::Write as _;
use std::mem::offset_of;

use super::object;
use super::pins::{LinkName, PINS_VERSION, PinnedProgram};

/// A key or value of each kind with a different number in each field, as bytes.
fn values() -> [(&'static str, Vec<u8>); 5] {
    let port = PortKey { netns: 1, ifindex: 2 };
    let limits = Port {
        frame_ns: 1,
        depth_ns: 2,
        full_at_ns: 3,
        answers: 4,
        steered: 5,
        connection_ns: 6,
        connection_depth_ns: 7,
        connections_full_at_ns: 8,
        guarded: 9,
    };
    let mac = [3, 4, 5, 6, 7, 8];
    [
        ("PortKey", port.to_bytes().into()),
        ("Port", limits.to_bytes().into()),
        ("IdentityKey", IdentityKey { port, mac, reserved: [0; 2] }.to_bytes().into()),
        ("Identity", Identity { slot: 1, hub: 2, drain: 3, reserved: 0 }.to_bytes().into()),
        ("Guest", Guest { mac, live: 1 }.to_bytes().into()),
    ]
}

/// The values that one agent writes and another maps or copies: fields with their offsets.
fn offsets() -> [(&'static str, Vec<(&'static str, usize)>); 2] {
    macro_rules! fields {
        ($of:ident: $($field:ident)+) => { (stringify!($of), vec![$((stringify!($field), offset_of!($of, $field))),+]) };
    }
    [
        fields!(InheritedState: key side reserved),
        fields!(AllSent: flow sent received finished opened held acknowledged closed),
    ]
}

#[test]
fn formats_of_pins_change_only_with_their_version() {
    let mut text = String::new();
    for on in [PinnedProgram::Xdp, PinnedProgram::Tcx, PinnedProgram::Hub] {
        let link = LinkName { on, netns: 3, cookie: Cookie::from_number(0x1a2b), ifindex: 17 };
        writeln!(text, "links/{link}").expect("memory");
    }
    for (map, [kind, key, value, entries]) in object::layouts().expect("the objects parse") {
        let map = name::pin(map);
        writeln!(text, "maps/{map}: kind {kind}, key {key}, value {value}, entries {entries}")
            .expect("memory");
    }
    for (value, bytes) in values() {
        let bytes: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{value}: {bytes}").expect("memory");
    }
    for (value, fields) in offsets() {
        let fields: Vec<_> = fields.iter().map(|(field, at)| format!("{field} at {at}")).collect();
        writeln!(text, "{value}: {}", fields.join(", ")).expect("memory");
    }
    let version = PINS_VERSION.strip_prefix('v').and_then(|number| number.parse().ok());
    golden::check("pins", version.expect("a number"), text.as_bytes());
}
