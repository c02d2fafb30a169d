//! VMs in a hundred namespaces: the agent serves each in its namespace, and the next agent serves all after a kill.

mod node;

use node::Node;
use std::time::Duration;
use support::privileged;

const NAMESPACES: u16 = 100;
/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest waits for an answer on one connection.
const ATTEMPT: Duration = Duration::from_secs(1);

#[test]
fn the_next_agent_answers_guests_of_a_hundred_namespaces_after_a_kill() {
    if !privileged::or_skip() {
        return;
    }
    for steer in ["auto", "tcx"] {
        let node = Node::new(NAMESPACES, &["--steer", steer]).expect("a node");
        let agent = node.agent().expect("an agent");
        node.all_ask(PATIENCE).unwrap_or_else(|error| panic!("{steer}: {error:#}"));
        agent.kill().expect("killed");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| node.all_ask_again(PATIENCE, ATTEMPT));
            let _agent = node.agent().expect("the next agent");
            let asked = asking.join().expect("no panic");
            asked.unwrap_or_else(|error| panic!("{steer}: {error:#}"));
        });
    }
}
