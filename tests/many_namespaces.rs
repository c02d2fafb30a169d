//! VMs in a hundred namespaces: each is served in its own, and by the next agent when one is killed.

#[path = "many_namespaces/node.rs"]
mod node;

use node::Node;
use std::time::Duration;
use support::privileged;

const NAMESPACES: u16 = 100;
/// For what must come: generous, since it is waited out only in failure.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest waits for an answer on one connection.
const ATTEMPT: Duration = Duration::from_secs(1);

#[test]
fn guests_of_a_hundred_namespaces_are_answered_by_the_next_agent_when_one_is_killed() {
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
            let _agent = node.agent().expect("another agent");
            let asked = asking.join().expect("no panic");
            asked.unwrap_or_else(|error| panic!("{steer}: {error:#}"));
        });
    }
}
