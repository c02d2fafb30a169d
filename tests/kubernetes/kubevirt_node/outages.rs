//! The API server fails, the agent is killed, or both: guests stay served, and later the agent catches up on changes.

use anyhow::ensure;
use support::agent::Agent;
use support::exposition::{self, sum};

use super::node::{
    Node, Pod, eventually_gets, gets, may_run, times_logged, wait_for, wait_until_namespace_is_gone,
};

const PATH: &str = "/v1/user-data";

/// Waits until the agent has saved the VMI for the next agent.
#[track_caller]
fn wait_until_saved(agent: &Agent<'_>, node: &Node, pod: &Pod<'_>) {
    wait_for(agent, "VMIs are saved", || {
        ensure!(node.saved_vmis().contains(&pod.uid), "{} is not saved yet", pod.key());
        Ok(())
    });
}

/// A sum from the agent's metrics.
#[track_caller]
fn metric(agent: &Agent<'_>, name: &str, labels: &[(&str, &str)]) -> f64 {
    let (_, text) = agent.ask("/metrics").expect("metrics");
    sum(&exposition::read(&text).expect("metrics"), name, labels).expect("a family")
}

#[test]
fn guests_stay_served_during_an_api_outage_and_later_changes_are_picked_up() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let (mut first, mut second) = (node.pod(1), node.pod(2));
    let guest = first.run("# known\n");
    let leaving = second.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &leaving, PATH, "# leaving\n");
    node.server.be_away(true);
    wait_for(&agent, "the outage is noticed", || {
        ensure!(times_logged(&agent, "the API server cannot be used") == 2, "not in the log of both watches");
        Ok(())
    });
    assert!(!agent.log().contains("ERROR"), "the outage is logged only as a warning:\n{}", agent.log());
    // The open watches end first, then no connection is accepted.
    wait_for(&agent, "connections are refused", || {
        let server = node.status().expect("a status").api_server.expect("an API server");
        ensure!(server.failing.as_ref().is_some_and(|failing| failing.kind == "refused"), "{server:?}");
        Ok(())
    });
    let away = node.status().expect("a status");
    let trouble = "requests to the API server have failed for";
    assert!(away.troubles.iter().any(|line| line.starts_with(trouble)), "{:?}", away.troubles);
    assert_eq!(metric(&agent, "xdp_imds_api_server_failing", &[]), 1.0);
    wait_for(&agent, "refusals are counted", || {
        let refused = metric(&agent, "xdp_imds_api_server_failures_total", &[("kind", "refused")]);
        ensure!(refused >= 2.0, "{refused}");
        Ok(())
    });
    let silence = metric(&agent, "xdp_imds_api_server_silence_seconds", &[]);
    wait_for(&agent, "silence grows", || {
        ensure!(
            metric(&agent, "xdp_imds_api_server_silence_seconds", &[]) > silence,
            "the metric does not grow"
        );
        Ok(())
    });
    gets(&guest, PATH, "# known\n").expect("served as before");
    // The node's pods continue: Secrets change, launchers end, and VMIs are created and changed unseen.
    first.secret("# new\n");
    eventually_gets(&agent, &guest, PATH, "# new\n");
    let key = second.key();
    let outer = second.end(leaving);
    wait_until_namespace_is_gone(&agent, &node, &outer);
    node.server.delete(&key);
    let mut third = node.pod(3);
    let other = third.run("# unseen\n");
    let mut vmi = first.vmi();
    vmi["spec"]["hostname"] = "renamed".into();
    node.server.put(vmi);
    node.server.forget();
    node.server.be_away(false);
    wait_for(&agent, "the recovery is noticed", || {
        ensure!(times_logged(&agent, "the API server is back") == 2, "not in the log of both watches");
        Ok(())
    });
    assert!(times_logged(&agent, "the API server's history is gone") >= 1, "{}", agent.log());
    let back = node.status().expect("a status");
    let server = back.api_server.expect("the API server");
    assert!(
        server.answered.is_some() && server.failing.is_none() && server.failures["gone"] >= 1,
        "{server:?}"
    );
    assert!(back.troubles.is_empty(), "{:?}", back.troubles);
    eventually_gets(&agent, &other, PATH, "# unseen\n");
    eventually_gets(&agent, &guest, "/v1/meta-data", "renamed");
    gets(&guest, PATH, "# new\n").expect("as before");
    assert_eq!(node.instances().expect("instances").len(), 2);
}

#[test]
fn an_agent_restarted_after_a_kill_serves_as_before() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# known\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    agent.kill().expect("it ran until now");
    // Meanwhile a launcher may end and another may start.
    let mut next = node.pod(2);
    let other = next.run("# came meanwhile\n");
    let agent = node.agent();
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &other, PATH, "# came meanwhile\n");
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
}

#[test]
fn an_agent_killed_during_an_api_outage_serves_the_saved_vmis_again() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let (mut pod, mut ending) = (node.pod(1), node.pod(2));
    let guest = pod.run("# known\n");
    let leaving = ending.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &leaving, PATH, "# leaving\n");
    wait_until_saved(&agent, &node, &pod);
    wait_until_saved(&agent, &node, &ending);
    node.server.be_away(true);
    agent.kill().expect("it ran until now");
    // The launcher ends while no agent runs.
    let outer = ending.end(leaving);
    let agent = node.agent();
    wait_until_namespace_is_gone(&agent, &node, &outer);
    eventually_gets(&agent, &guest, PATH, "# known\n");
    pod.secret("# new\n");
    eventually_gets(&agent, &guest, PATH, "# new\n");
    let mut next = node.pod(3);
    let other = next.run("# other\n");
    node.server.be_away(false);
    eventually_gets(&agent, &other, PATH, "# other\n");
    gets(&guest, PATH, "# new\n").expect("as before");
    wait_for(&agent, "the ended VM is removed", || {
        ensure!(node.links() == 2, "{} programs are attached", node.links());
        Ok(())
    });
}

#[test]
fn an_agent_that_takes_over_serves_the_previous_agents_pods() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# known\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    let next = node.agent_with(&["--takeover"]);
    gets(&guest, PATH, "# known\n").expect("served by the next agent");
    agent.ended(super::node::PATIENCE).expect("it leaves");
    gets(&guest, PATH, "# known\n").expect("served by the next agent");
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&next, &node, &outer);
}
