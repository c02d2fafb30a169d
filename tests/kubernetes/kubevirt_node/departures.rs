//! VMs that leave the node: by migration, when their launcher ends, and to restart.

use anyhow::ensure;
use serde_json::json;
use support::guest::Route;
use support::pod::Binding;

use super::PATH;
use super::node::{
    ELSEWHERE, HERE, MIGRATES_TO, Node, RUNS_ON, eventually_gets, gets, may_run, times_logged, wait_for,
    wait_until_namespace_is_gone,
};

#[support::privileged::test(may_run)]
fn the_end_of_a_launcher_releases_its_vm_and_its_namespace() {
    for guard in ["none", "all"] {
        release_at_launchers_end(guard);
    }
}

fn release_at_launchers_end(guard: &str) {
    let node = Node::new();
    let agent = node.agent_with(&["--guard", guard]);
    let mut pod = node.pod(1);
    let mut neighbour = node.pod(2);
    let (guest, other) = (pod.run("# its own\n"), neighbour.run("# another\n"));
    eventually_gets(&agent, &guest, PATH, "# its own\n");
    eventually_gets(&agent, &other, PATH, "# another\n");
    // A guest is answered a moment before its program is pinned.
    wait_for(&agent, "both programs are pinned", || {
        ensure!(node.links() == 2, "{} programs are pinned", node.links());
        Ok(())
    });
    // The VMI still exists; virt-controller deletes it after it sees the pod end.
    let key = pod.key();
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
    wait_for(&agent, "the VM is released", || {
        ensure!(node.links() == 1, "{} programs are still attached", node.links());
        let names: Vec<_> = node.instances()?.into_iter().map(|instance| instance.name).collect();
        ensure!(!names.contains(&key) && names.len() == 1, "{names:?}");
        ensure!(node.status()?.identities == 1, "the MAC of the VM is still registered");
        Ok(())
    });
    gets(&other, PATH, "# another\n").expect("the neighbour is served");
    node.server.delete(&key);
}

#[support::privileged::test(may_run)]
fn a_vm_restarted_under_its_name_gets_its_new_record() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# first life\n");
    eventually_gets(&agent, &guest, PATH, "# first life\n");
    let key = pod.key();
    let outer = pod.end(guest);
    node.server.delete(&key);
    let mut again = node.pod(1);
    let guest = again.run("# second life\n");
    eventually_gets(&agent, &guest, PATH, "# second life\n");
    wait_until_namespace_is_gone(&agent, &node, &outer);
}

#[support::privileged::test(may_run)]
fn a_migration_target_answers_before_and_after_the_vm_arrives() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# moved\n");
    pod.launch();
    let guest = pod.boot();
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE, MIGRATES_TO: HERE});
    vmi["status"]["activePods"]["pod-of-the-source"] = ELSEWHERE.into();
    node.server.put(vmi);
    // The target already answers on standby, so a request right after the switch-over gets an answer.
    eventually_gets(&agent, &guest, PATH, "# moved\n");
    node.server.put(pod.vmi());
    // When a later VMI is served, the feed has also handled this VMI.
    let mut next = node.pod(2);
    let other = next.run("# next\n");
    eventually_gets(&agent, &other, PATH, "# next\n");
    gets(&guest, PATH, "# moved\n").expect("it is active");
    wait_for(&agent, "each is attached once", || {
        let attached = times_logged(&agent, "attached port=");
        ensure!(attached == 2, "{attached} times");
        Ok(())
    });
    assert_eq!(times_logged(&agent, "detached port="), 0, "{}", agent.log());
}

#[support::privileged::test(may_run)]
fn a_guest_is_served_after_its_migration_by_the_mac_of_its_first_pod() {
    for binding in [Binding::Masquerade, Binding::Bridge] {
        let node = Node::new();
        let agent = node.agent();
        let mut pod = node.pod_on(1, "0a:58:0a:80:00:05".parse().expect("a MAC"));
        pod.secret("# moved\n");
        pod.launch();
        let guest = pod.boot_as(binding, Route::OnLink);
        let arrived = pod.vmi_without_mac(binding);
        let mut coming = arrived.clone();
        coming["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE, MIGRATES_TO: HERE});
        coming["status"]["activePods"]["pod-of-the-source"] = ELSEWHERE.into();
        node.server.put(coming);
        eventually_gets(&agent, &guest, PATH, "# moved\n");
        // The next agent knows the MAC before the API server answers.
        wait_for(&agent, "the VMI is saved", || {
            ensure!(node.saved_vmis().contains(&pod.uid), "it is not saved yet");
            Ok(())
        });
        node.server.be_away(true);
        agent.kill().expect("it ran until now");
        let agent = node.agent();
        eventually_gets(&agent, &guest, PATH, "# moved\n");
        node.server.be_away(false);
        node.server.put(arrived);
        wait_for(&agent, "the API server is back", || {
            ensure!(
                node.status()?.sources.first().is_some_and(|server| server.failing.is_none()),
                "it is not"
            );
            Ok(())
        });
        gets(&guest, PATH, "# moved\n").expect("it is active");
    }
}

#[support::privileged::test(may_run)]
fn a_failed_migration_leaves_nothing_on_its_target() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# never here\n");
    pod.launch();
    let guest = pod.boot();
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE, MIGRATES_TO: HERE});
    node.server.put(vmi.clone());
    eventually_gets(&agent, &guest, PATH, "# never here\n");
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE});
    vmi["status"]["activePods"] = json!({"pod-of-the-source": ELSEWHERE});
    node.server.put(vmi);
    wait_for(&agent, "the standby is dropped", || {
        ensure!(node.links() == 0 && node.instances()?.is_empty(), "the standby still exists");
        Ok(())
    });
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
}

#[support::privileged::test(may_run)]
fn a_migration_source_serves_until_its_launcher_ends() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# leaving\n");
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: HERE, MIGRATES_TO: ELSEWHERE});
    vmi["status"]["activePods"]["pod-of-the-target"] = ELSEWHERE.into();
    node.server.put(vmi.clone());
    // Completed: the VMI now belongs to the target and leaves this node's watch.
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE});
    node.server.put(vmi);
    let mut next = node.pod(2);
    let other = next.run("# next\n");
    eventually_gets(&agent, &other, PATH, "# next\n");
    gets(&guest, PATH, "# leaving\n").expect("its launcher runs");
    assert_eq!(times_logged(&agent, "detached port="), 0, "{}", agent.log());
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
    wait_for(&agent, "the VM is released", || {
        let names: Vec<_> = node.instances()?.into_iter().map(|instance| instance.name).collect();
        ensure!(names == [next.key()], "{names:?}");
        Ok(())
    });
    // The state saved for the next agent no longer contains it.
    wait_for(&agent, "it is no longer saved", || {
        ensure!(!node.saved_vmis().contains(&guest_name(1)), "the VMI is still saved");
        Ok(())
    });
}

fn guest_name(number: u16) -> String {
    format!("\"guest-{number}\"")
}

#[support::privileged::test(may_run)]
fn a_vm_with_two_pods_on_this_node_is_served_in_both() {
    let node = Node::new();
    let agent = node.agent();
    let (mut source, mut target) = (node.pod(1), node.pod(1));
    target.vmi_uid.clone_from(&source.vmi_uid);
    for pod in [&mut source, &mut target] {
        pod.secret("# twice\n");
        pod.launch();
    }
    let guests = [source.boot(), target.boot()];
    let mut vmi = source.vmi();
    vmi["status"]["activePods"][&target.uid] = HERE.into();
    node.server.put(vmi);
    for guest in &guests {
        eventually_gets(&agent, guest, PATH, "# twice\n");
    }
    let [guest, other] = guests;
    let outer = source.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
    gets(&other, PATH, "# twice\n").expect("the target is served");
    drop(other);
}
