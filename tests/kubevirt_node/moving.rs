//! VMs that go: by migration, by their launcher's end, and to begin anew.

use anyhow::ensure;
use serde_json::json;

use crate::node::{
    COMES_TO, ELSEWHERE, HERE, Node, RUNS_ON, comes, eventually_gets, gets, may_run, namespace_goes, said,
};

const PATH: &str = "/v1/user-data";

#[test]
fn when_a_launcher_ends_its_vm_is_let_go_and_its_namespace_is_freed() {
    if !may_run() {
        return;
    }
    for guard in ["none", "all"] {
        let_go(guard);
    }
}

fn let_go(guard: &str) {
    let node = Node::new();
    let agent = node.agent_with(&["--guard", guard]);
    let mut pod = node.pod(1);
    let mut neighbour = node.pod(2);
    let (guest, other) = (pod.run("# its own\n"), neighbour.run("# another\n"));
    eventually_gets(&agent, &guest, PATH, "# its own\n");
    eventually_gets(&agent, &other, PATH, "# another\n");
    assert_eq!(node.links(), 2);
    // The VMI is there still, as it is until virt-controller has seen the pod end.
    let key = pod.key();
    let outer = pod.end(guest);
    namespace_goes(&agent, &node, &outer);
    comes(&agent, "the VM is let go", || {
        ensure!(node.links() == 1, "{} programs are still attached", node.links());
        let names: Vec<_> = node.instances()?.into_iter().map(|instance| instance.name).collect();
        ensure!(!names.contains(&key) && names.len() == 1, "{names:?}");
        ensure!(node.status()?.identities == 1, "its MAC is still known");
        Ok(())
    });
    gets(&other, PATH, "# another\n").expect("the neighbour is served");
    node.server.delete(&key);
}

#[test]
fn a_vm_that_starts_again_under_its_name_is_told_what_is_new() {
    if !may_run() {
        return;
    }
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
    namespace_goes(&agent, &node, &outer);
}

#[test]
fn the_target_of_a_migration_answers_before_the_vm_is_there_and_goes_on_when_it_is() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# moved\n");
    pod.launch();
    let guest = pod.boot();
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE, COMES_TO: HERE});
    vmi["status"]["activePods"]["pod-of-the-source"] = ELSEWHERE.into();
    node.server.put(vmi);
    // Standby: what the guest asks first after the switch-over is answered, whenever that is.
    eventually_gets(&agent, &guest, PATH, "# moved\n");
    node.server.put(pod.vmi());
    // A VMI that comes later has been heard of later.
    let mut next = node.pod(2);
    let other = next.run("# next\n");
    eventually_gets(&agent, &other, PATH, "# next\n");
    gets(&guest, PATH, "# moved\n").expect("it is active");
    comes(&agent, "each is attached once", || {
        let attached = said(&agent, "attached port=");
        ensure!(attached == 2, "{attached} times");
        Ok(())
    });
    assert_eq!(said(&agent, "detached port="), 0, "{}", agent.said());
}

#[test]
fn a_migration_that_fails_leaves_nothing_on_its_target() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# never here\n");
    pod.launch();
    let guest = pod.boot();
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE, COMES_TO: HERE});
    node.server.put(vmi.clone());
    eventually_gets(&agent, &guest, PATH, "# never here\n");
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE});
    vmi["status"]["activePods"] = json!({"pod-of-the-source": ELSEWHERE});
    node.server.put(vmi);
    comes(&agent, "the standby is dropped", || {
        ensure!(node.links() == 0 && node.instances()?.is_empty(), "it is still there");
        Ok(())
    });
    let outer = pod.end(guest);
    namespace_goes(&agent, &node, &outer);
}

#[test]
fn the_source_of_a_migration_serves_until_its_launcher_ends() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# leaving\n");
    let mut vmi = pod.vmi();
    vmi["metadata"]["labels"] = json!({RUNS_ON: HERE, COMES_TO: ELSEWHERE});
    vmi["status"]["activePods"]["pod-of-the-target"] = ELSEWHERE.into();
    node.server.put(vmi.clone());
    // Completed: the VMI is the target's, and has left what this node watches.
    vmi["metadata"]["labels"] = json!({RUNS_ON: ELSEWHERE});
    node.server.put(vmi);
    let mut next = node.pod(2);
    let other = next.run("# next\n");
    eventually_gets(&agent, &other, PATH, "# next\n");
    gets(&guest, PATH, "# leaving\n").expect("its launcher runs");
    assert_eq!(said(&agent, "detached port="), 0, "{}", agent.said());
    let outer = pod.end(guest);
    namespace_goes(&agent, &node, &outer);
    comes(&agent, "the VM is let go", || {
        let names: Vec<_> = node.instances()?.into_iter().map(|instance| instance.name).collect();
        ensure!(names == [next.key()], "{names:?}");
        Ok(())
    });
    // What is kept for the next agent does not have it any more.
    comes(&agent, "it is not kept", || {
        ensure!(!node.kept().contains(&guest_name(1)), "it is still kept");
        Ok(())
    });
}

fn guest_name(number: u16) -> String {
    format!("\"guest-{number}\"")
}

#[test]
fn a_vm_that_is_on_this_node_twice_is_served_in_both_pods() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let (mut source, mut target) = (node.pod(1), node.pod(1));
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
    namespace_goes(&agent, &node, &outer);
    gets(&other, PATH, "# twice\n").expect("the target is served");
    drop(other);
}
