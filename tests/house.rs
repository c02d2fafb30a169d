//! The manifests keep the rules of the house: who may know whom, and who may know what.
//!
//! `cargo tree` without network says what each crate links, with the features of that crate alone.

#[path = "house/imports.rs"]
mod imports;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

const KUBE: &[&str] = &["kube", "k8s-openapi", "tokio-rustls"];
const AYA: &[&str] = &["aya", "aya-obj", "aya-log"];
const RUNTIME: &[&str] = &["tokio", "hyper", "axum"];

type Names = &'static [&'static str];
/// A crate, the crates of the house it may name, and packages that it links in no way.
type Room = (&'static str, Names, &'static [Names]);

const ROOMS: [Room; 9] = [
    ("metadata-base", &["metadata-common"], &[KUBE, AYA, RUNTIME, &["serde", "rustix", "libc"]]),
    (
        "metadata-content",
        &["metadata-base", "metadata-common"],
        &[KUBE, AYA, RUNTIME, &["rustix", "rtnetlink", "tracing"]],
    ),
    ("metadata-datapath", &["metadata-base", "metadata-common"], &[KUBE, AYA, RUNTIME, &["serde", "anyhow"]]),
    ("metadata-state", &["metadata-content"], &[KUBE, AYA, &["hyper", "axum", "rtnetlink"]]),
    (
        "metadata-serve",
        &["metadata-base", "metadata-common", "metadata-content", "metadata-datapath", "metadata-state"],
        &[KUBE, AYA, &["hyper", "axum", "rtnetlink"]],
    ),
    ("metadata-links", &["metadata-base", "metadata-common"], &[KUBE, AYA, &["hyper", "axum", "serde"]]),
    (
        "metadata-steer",
        &["metadata-base", "metadata-common", "metadata-datapath", "metadata-links"],
        &[KUBE, &["hyper", "axum"]],
    ),
    (
        "metadata-feed",
        &["metadata-base", "metadata-common", "metadata-content", "metadata-links", "metadata-state"],
        &[KUBE, AYA, &["axum"]],
    ),
    (
        "metadata-control",
        &["metadata-base", "metadata-content"],
        &[KUBE, AYA, &["tokio", "axum", "rtnetlink"]],
    ),
];

fn tree(package: &str, more: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "tree",
            "--offline",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
            "--package",
            package,
        ])
        .args(more)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{package}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn each_crate_names_the_crates_it_may_and_no_others() {
    for (room, allowed, _) in ROOMS {
        let named: BTreeSet<_> = tree(room, &["--depth", "1", "--all-features"]);
        let named =
            named.iter().map(String::as_str).filter(|name| name.starts_with("metadata-") && *name != room);
        let beyond: Vec<_> = named.filter(|name| !allowed.contains(name)).collect();
        assert!(beyond.is_empty(), "{room} names {beyond:?}");
    }
}

#[test]
fn no_crate_links_what_its_room_must_not_know() {
    for (room, _, forbidden) in ROOMS {
        let linked = tree(room, &["--no-default-features"]);
        let found: Vec<_> =
            forbidden.iter().copied().flatten().filter(|name| linked.contains(**name)).collect();
        assert!(found.is_empty(), "{room} links {found:?}");
    }
}

#[test]
fn aya_is_named_by_steering_alone_and_kube_by_the_feeds_alone() {
    let rooms = ROOMS.iter().map(|(room, ..)| *room).chain(["metadata-user"]);
    for room in rooms {
        let named = tree(room, &["--depth", "1", "--all-features"]);
        for (names, owner) in [(AYA, "metadata-steer"), (&["kube", "k8s-openapi"][..], "metadata-feed")] {
            let found = names.iter().any(|name| named.contains(*name));
            assert_eq!(found, room == owner, "{room} and {names:?}");
        }
    }
}

#[test]
fn no_room_imports_one_that_imports_it() {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-user"));
    let below = std::fs::read_dir(crates).expect("a directory of crates");
    let below = below.map(|entry| entry.expect("an entry").path());
    let sources = below.chain([crates.to_owned()]).map(|path| path.join("src")).filter(|src| src.is_dir());
    let sources: BTreeSet<_> = sources.collect();
    assert!(sources.len() > ROOMS.len(), "expected every crate, found {sources:?}");
    // The agent is the largest room, and has rooms of its own.
    let agent = imports::rooms(&crates.join("src/agent"));
    let rooms = sources.iter().map(|src| (src.clone(), src.clone()));
    let rooms = rooms.chain(agent.into_iter().map(|room| (crates.join("src"), room)));
    let circles: Vec<_> = rooms
        .filter_map(|(src, room)| {
            let circle = imports::circle(&imports::graph(&src, &room))?;
            Some(format!("{}:\n  {}", room.display(), circle.join("\n  ")))
        })
        .collect();
    assert!(circles.is_empty(), "modules that import each other:\n{}", circles.join("\n"));
}
