//! The checks: each is a few tests of one test program.

use std::time::Duration;

/// What a check needs from the kernel beyond what the agent needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// tcx links (Linux 6.6).
    Tcx,
}

/// Some tests of one program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// A word or two for the table.
    pub(crate) name: &'static str,
    /// The name of a directory of `tests/`.
    pub(crate) program: &'static str,
    /// The tests, each with the module that has it.
    pub(crate) tests: &'static [&'static str],
    pub(crate) needs: Needs,
    /// Part of the short run, which CI makes.
    pub(crate) short: bool,
}

/// The longest time of a check on an emulated processor. A check takes some seconds on a real one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(420);

const fn check(name: &'static str, program: &'static str, tests: &'static [&'static str]) -> Check {
    Check { name, program, tests, needs: Needs::Nothing, short: false }
}

impl Check {
    const fn short(self) -> Self {
        Self { short: true, ..self }
    }

    const fn needs_tcx(self) -> Self {
        Self { needs: Needs::Tcx, ..self }
    }

    /// The line that `init.sh` reads.
    pub(crate) fn line(&self) -> String {
        let Self { name, program, tests, needs, .. } = self;
        let needs = if *needs == Needs::Tcx { "tcx" } else { "" };
        format!("{name}|{needs}|{}|{program}|{}\n", PATIENCE.as_secs(), tests.join(" "))
    }
}

/// All checks, in the order in which they run.
pub(crate) const ALL: &[Check] = &[
    check("programs load", "steering", &["kernel_answers::the_verifier_is_far_from_its_limit"]).short(),
    check(
        "verdicts",
        "steering",
        &[
            "verdicts::every_named_frame_gets_its_verdict",
            "verdicts::port_and_mac_together_identify_a_guest",
            "verdicts::answers_leave_the_hub_for_the_guest_they_are_stamped_with",
            "verdicts::programs_behind_a_stub_give_the_same_verdicts_in_their_namespace",
        ],
    ),
    check(
        "AF_XDP",
        "steering",
        &[
            "afxdp_socket::every_frame_arrives_whole_and_in_order",
            "afxdp_socket::frames_beyond_the_rx_ring_are_counted_and_those_before_arrive",
            "afxdp_socket::frames_beyond_the_last_chunk_are_counted_and_those_before_arrive",
            "afxdp_socket::a_frame_longer_than_a_chunk_is_counted_and_harms_no_other",
            "afxdp_socket::a_closed_sockets_queue_can_be_bound_again_at_once",
            "afxdp_socket::a_sleeping_worker_wakes_for_each_frame_and_answers_through_the_tap",
        ],
    )
    .short(),
    check(
        "XDP and tcx alike",
        "steering",
        &[
            "modes::every_frame_of_the_table_gets_the_same_verdict_from_xdp_and_tcx",
            "modes::switching_under_load_loses_no_frame_and_leaks_none",
        ],
    )
    .needs_tcx(),
    check(
        "guest behind a tap",
        "guests",
        &[
            "one_guest::a_guest_gets_its_own_metadata_on_link_and_through_its_gateway",
            "one_guest::requests_with_a_foreign_mac_are_dropped_and_counted",
        ],
    ),
    check("IPv6", "guests", &["every_address::every_default_address_is_served_on_link"]).short(),
    check("64 KiB", "guests", &["long_answers::large_user_data_passes_a_tap_with_a_smaller_mtu_than_the_guests_nic"]),
    check("long frames", "guests", &["long_answers::a_large_answer_takes_few_frames_over_either_family_and_any_tap"])
        .needs_tcx(),
    check(
        "namespaces",
        "steering",
        &[
            "modes::a_port_in_another_namespace_is_served_like_a_local_one",
            "modes::ports_of_equal_index_in_two_namespaces_are_distinct",
            "life::a_port_in_another_namespace_is_inherited",
        ],
    ),
    check(
        "namespace with tcx",
        "guests",
        &["every_address::every_default_address_is_served_by_a_classifier_from_another_namespace"],
    )
    .needs_tcx(),
    check(
        "kernel answers",
        "guests",
        &["answers_on_a_tap::the_agent_sees_one_frame_of_a_small_request", "answers_on_a_tap::without_kernel_answers_every_frame_is_steered"],
    ),
    check(
        "requests on a tap",
        "guests",
        &[
            "requests_on_a_tap::the_kernel_answers_a_third_vm_from_its_own_record",
            "requests_on_a_tap::published_answers_outlive_a_killed_agent_and_the_next_one_serves_none_of_them",
        ],
    )
    .short(),
    check(
        "answers by policy",
        "steering",
        &[
            "kernel_answers::the_end_of_a_connection_over_either_family_is_acknowledged_and_recorded",
            "kernel_answers::the_kernel_follows_the_policy",
        ],
    )
    .short(),
    check(
        "kill -9, resume",
        "agent",
        &[
            "outlives_the_agent::no_frame_for_the_metadata_address_leaves_a_tap_after_its_agent_was_killed",
            "outlives_the_agent::a_request_sent_while_no_agent_runs_is_answered_by_the_next",
        ],
    )
    .short(),
    check(
        "takeover",
        "agent",
        &["takeover::long_connections_finish_at_their_agent_and_their_writes_survive"],
    )
    .short(),
    check(
        "takeover with tcx",
        "agent",
        &["takeover::long_connections_of_a_pod_with_classifiers_finish_and_their_writes_survive"],
    )
    .needs_tcx(),
    check(
        "vhost: guest",
        "guests",
        &[
            "one_guest::a_guest_behind_vhost_net_gets_its_own_metadata_on_link_and_through_its_gateway",
            "one_guest::requests_with_a_foreign_mac_behind_vhost_net_are_dropped_and_counted",
        ],
    ),
    check(
        "vhost: kernel answers",
        "guests",
        &[
            "answers_on_a_tap::the_agent_sees_one_frame_of_a_small_request_behind_vhost_net",
            "answers_on_a_tap::without_kernel_answers_every_frame_behind_vhost_net_is_steered",
        ],
    ),
    check(
        "vhost: long frames",
        "guests",
        &[
            "long_answers::a_large_answer_behind_vhost_net_takes_few_frames_over_either_family",
            "long_answers::a_lost_long_frame_behind_vhost_net_is_sent_again_in_segments",
        ],
    )
    .needs_tcx(),
    check(
        "segments",
        "guests",
        &[
            "long_answers::a_guest_of_another_namespace_gets_large_answers_segment_by_segment",
            "long_answers::a_guest_of_another_namespace_behind_vhost_net_gets_large_answers_segment_by_segment",
        ],
    )
    .short(),
    check(
        "attach under traffic",
        "guests",
        &[
            "guest_traffic::agents_that_come_and_go_under_traffic_lose_none_of_it",
            "guest_traffic::agents_that_come_and_go_under_traffic_behind_vhost_net_lose_none_of_it",
        ],
    ),
    check(
        "full rings",
        "guests",
        &[
            "answers_on_a_tap::a_fin_dropped_by_a_full_ring_is_resent_when_the_guest_repeats_its_own",
            "answers_on_a_tap::a_fin_dropped_by_a_full_ring_of_vhost_net_is_resent_when_the_guest_repeats_its_own",
        ],
    ),
    check(
        "detached queues",
        "steering",
        &[
            "tap_queues::a_guest_whose_other_queues_are_detached_is_served_from_any_cpu",
            "tap_queues::a_guest_behind_vhost_net_whose_other_queues_are_detached_is_served_from_any_cpu",
            "tap_queues::xdp_answers_by_the_attached_queue_of_its_cpu_even_if_the_guest_does_not_read_it",
        ],
    ),
    check(
        "queues with tcx",
        "steering",
        &["tap_queues::with_classifiers_answers_follow_the_queue_that_the_guest_uses"],
    )
    .needs_tcx(),
    check("guard: all", "steering", &["guarding::a_tap_without_a_record_blocks_metadata_traffic_and_nothing_else"]),
    check(
        "sandbox",
        "agent",
        &[
            "least_privilege::a_serving_agent_drops_the_capabilities_it_no_longer_needs",
            "least_privilege::running_a_program_ends_the_agent_and_starting_a_process_fails",
        ],
    )
    .short(),
    check("doctor", "operator", &["doctor::no_check_fails_on_a_healthy_node_and_doctor_leaves_nothing_behind"]).short(),
];

/// The programs of these checks, each once.
pub(crate) fn programs(checks: &[&Check]) -> Vec<&'static str> {
    let mut programs: Vec<_> = checks.iter().map(|check| check.program).collect();
    programs.sort_unstable();
    programs.dedup();
    programs
}

#[cfg(test)]
mod tests {
    use super::ALL;
    use std::collections::BTreeSet;
    use std::fs;

    #[test]
    fn every_test_of_a_check_exists() {
        for check in ALL {
            for test in check.tests {
                let (module, name) = test.rsplit_once("::").expect("a module");
                let file = format!("tests/{}/{}.rs", check.program, module.replace("::", "/"));
                let source = fs::read_to_string(shell::top().join(&file)).unwrap_or_default();
                let is_there = ["test]", "test(may_run)]", "test(allowed)]"]
                    .iter()
                    .any(|attribute| source.contains(&format!("{attribute}\nfn {name}()")));
                assert!(is_there, "no test {name} in {file}");
            }
        }
    }

    #[test]
    fn names_of_checks_are_unique_and_fit_a_line_of_fields() {
        let names: BTreeSet<_> = ALL.iter().map(|check| check.name).collect();
        assert_eq!(names.len(), ALL.len());
        for check in ALL {
            assert_eq!(check.line().matches('|').count(), 4, "{}", check.line());
        }
    }
}
