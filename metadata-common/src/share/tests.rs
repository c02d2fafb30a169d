//! Properties of shares over seeded random tenants, and the cases that the properties are about.

use super::{FairQueue, FairShare, RESERVED_PART, Tenant};

const ROUNDS: u64 = 200;
const STEPS: usize = 400;

fn tenant(number: usize) -> Tenant {
    Tenant::namespace(&format!("n{number}"))
}

/// A random limit and floor, from tiny to large.
fn random_share(rng: &mut fastrand::Rng) -> (usize, usize) {
    let bits = rng.u32(1..30);
    let limit = rng.usize(1..1 << bits);
    (limit, rng.usize(0..=limit / RESERVED_PART))
}

#[test]
fn no_limit_is_ever_exceeded_and_the_sums_are_right() {
    for seed in 0..ROUNDS {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (limit, floor) = random_share(&mut rng);
        let mut share = FairShare::new(limit, floor);
        let mut held = [0_usize; 12];
        for _ in 0..STEPS {
            let (number, size) = (rng.usize(0..held.len()), rng.usize(0..=limit));
            let who = if number == 0 { Tenant::Operator } else { tenant(number) };
            if rng.bool() {
                let free = share.free_for(&who);
                assert_eq!(share.admit(&who, size).is_ok(), size <= free, "seed {seed}");
                held[number] += if size <= free { size } else { 0 };
            } else {
                share.release(&who, size);
                held[number] -= size.min(held[number]);
            }
            assert_eq!(share.held(&who), held[number], "seed {seed}");
            assert_eq!(share.used(), held.iter().sum::<usize>(), "seed {seed}");
            assert!(share.used() <= limit, "seed {seed}");
        }
    }
}

#[test]
fn a_tenant_above_the_floor_holds_at_most_half_of_what_others_leave() {
    for seed in 0..ROUNDS {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (limit, floor) = random_share(&mut rng);
        let mut share = FairShare::new(limit, floor);
        for _ in 0..STEPS {
            let (who, size) = (tenant(rng.usize(0..12)), rng.usize(1..=limit));
            if share.admit(&who, size).is_ok() && share.held(&who) > floor {
                let others = share.used() - share.held(&who);
                assert!(share.held(&who) <= (limit - others) / 2, "seed {seed}");
                assert!(share.used() <= limit - limit / RESERVED_PART, "seed {seed}");
            }
        }
    }
}

#[test]
fn small_newcomers_are_admitted_whatever_large_tenants_hold() {
    for seed in 0..ROUNDS {
        let mut rng = fastrand::Rng::with_seed(seed);
        let limit = rng.usize(64..1 << 30);
        let floor = limit / 64;
        let mut share = FairShare::new(limit, floor);
        // Tenants that each take all they get, in pieces of any size above the floor.
        for _ in 0..STEPS {
            let who = tenant(rng.usize(0..8));
            let free = share.free_for(&who);
            if share.held(&who) + free > floor {
                _ = share.admit(&who, free);
            }
        }
        for newcomer in 100..100 + RESERVED_PART {
            assert_eq!(share.admit(&tenant(newcomer), floor), Ok(()), "seed {seed}, newcomer {newcomer}");
        }
    }
}

#[test]
fn one_tenant_alone_holds_half_two_a_third_each_and_the_operator_everything() {
    const LIMIT: usize = 1 << 20;
    let mut share = FairShare::new(LIMIT, 16);
    let take_all = |share: &mut FairShare, who: &Tenant| {
        while share.admit(who, 1.max(share.free_for(who) / 2)).is_ok() {}
        share.held(who)
    };
    assert_eq!(take_all(&mut share, &tenant(1)), LIMIT / 2);
    let mut share = FairShare::new(LIMIT, 16);
    for _ in 0..LIMIT {
        _ = share.admit(&tenant(1), 1);
        _ = share.admit(&tenant(2), 1);
    }
    for number in [1, 2] {
        assert!(share.held(&tenant(number)).abs_diff(LIMIT / 3) <= 1, "{}", share.held(&tenant(number)));
    }
    let mut share = FairShare::new(LIMIT, 16);
    assert_eq!(take_all(&mut share, &Tenant::Operator), LIMIT);
}

#[test]
fn the_same_requests_have_the_same_results() {
    let run = || {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut share = FairShare::new(10_000, 100);
        (0..STEPS)
            .map(|_| share.admit(&tenant(rng.usize(0..9)), rng.usize(0..3_000)).is_ok())
            .collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn a_smaller_version_is_always_admitted_and_a_refused_one_changes_nothing() {
    let mut share = FairShare::new(1_000, 10);
    share.admit(&tenant(1), 500).expect("half");
    share.set_limit(100, 10);
    share.replace(&tenant(1), 500, 400).expect("it shrinks");
    let error = share.replace(&tenant(1), 400, 401).expect_err("the limit is exceeded");
    assert_eq!((error.held, error.share, error.limit, share.held(&tenant(1))), (400, 400, 100, 400));
    let text = error.to_string();
    assert!(text.contains("namespace/n1 holds 400") && text.contains("its share is 400"), "{text}");
    assert_eq!(share.refusals(), 1);
}

#[test]
fn reports_list_the_tenants_that_hold_most() {
    let mut share = FairShare::new(1_000_000, 10);
    for number in 1..=50 {
        share.admit(&tenant(number), number).expect("little");
    }
    let top = share.top();
    assert_eq!(top.len(), super::LISTED_TENANTS);
    assert_eq!(top[0], (tenant(50), 50));
    assert_eq!(top[9], (tenant(41), 41));
}

#[test]
fn tenants_take_turns_whatever_each_has_queued() {
    let mut queue = FairQueue::new(1_000, 4);
    for item in 0..400 {
        queue.push(&tenant(1), item).expect("a place");
    }
    queue.push(&tenant(2), 1_000).expect("a place");
    queue.push(&tenant(2), 1_001).expect("a place");
    let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, item)| item).take(5).collect();
    assert_eq!(order, [0, 1_000, 1, 1_001, 2]);
    assert_eq!(queue.len(), 397);
}

#[test]
fn one_tenant_cannot_fill_a_queue() {
    let mut queue = FairQueue::new(64, 2);
    let pushed = (0..1_000).filter(|item| queue.push(&tenant(1), *item).is_ok()).count();
    assert_eq!(pushed, 32);
    assert_eq!(queue.push(&tenant(2), 0), Ok(()));
    queue.retain(&tenant(1), |item| item % 2 == 0);
    assert_eq!((queue.len(), queue.of(&tenant(1)).count()), (17, 16));
    queue.retain(&tenant(1), |_| false);
    assert_eq!(queue.pop(), Some((tenant(2), 0)));
    assert!(queue.pop().is_none() && queue.is_empty());
}
