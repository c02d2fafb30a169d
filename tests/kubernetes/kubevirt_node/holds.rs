//! A live migration waits in the node hook until its guest is ready.

use serde_json::json;
use std::thread;

use super::node::{Node, PATIENCE, eventually_gets, may_run, wait_for};
use super::{PATH, call, socket};
use support::guest::METADATA;

#[support::privileged::test(may_run)]
fn a_live_migration_waits_for_its_guest_if_that_is_asked_for() {
    let node = Node::new();
    node.configure(&json!({"hook": socket(&node), "hold_seconds": 30}));
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# its own\n");
    eventually_gets(&agent, &guest, PATH, "# its own\n");
    assert_eq!(call(&node, "PreMigrationSource", &pod.vmi()), "0", "it does not migrate");
    let mut vmi = pod.vmi();
    vmi["status"]["migrationState"] = json!({"migrationUid": "m-1", "sourceNode": "a", "targetNode": "b"});
    thread::scope(|scope| {
        // virt-handler may know of the migration earlier than the agent.
        let migrates = scope.spawn(|| call(&node, "PreMigrationSource", &vmi));
        node.server.put(vmi.clone());
        let url = format!("http://{METADATA}/v1/events/migration-m-1");
        wait_for(&agent, "the guest is told", || {
            let told = guest.curl(&[&url], PATIENCE)?;
            anyhow::ensure!(told.status == 200, "{} {}", told.status, told.text());
            Ok(())
        });
        assert!(!migrates.is_finished(), "it goes on without its guest");
        assert_eq!(guest.curl(&["-X", "POST", &url], PATIENCE).expect("an answer").status, 204);
        assert_eq!(migrates.join().expect("no panic"), "0");
    });
    assert_eq!(call(&node, "PreMigrationSource", &vmi), "0", "virt-handler repeats its call");
    assert!(!agent.log().contains("has not acknowledged its migration"), "it waited for the limit");
}
