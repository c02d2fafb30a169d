//! The kernel's functions that the eBPF programs call (bpf-helpers(7)).

use aya::programs::ProgramType;
use aya::sys::{BpfHelper, is_helper_supported};

use crate::failure::Failure;

const BOTH: &[ProgramType] = &[ProgramType::Xdp, ProgramType::SchedClassifier];
const XDP: &[ProgramType] = &[ProgramType::Xdp];
const CLASSIFIER: &[ProgramType] = &[ProgramType::SchedClassifier];

/// Each function that the programs call, and the kinds of programs that call it.
const CALLED: [(&str, BpfHelper, &[ProgramType]); 14] = {
    use aya_obj::generated::bpf_func_id::*;
    [
        ("bpf_map_lookup_elem", BPF_FUNC_map_lookup_elem, BOTH),
        ("bpf_ktime_get_ns", BPF_FUNC_ktime_get_ns, BOTH),
        ("bpf_skb_store_bytes", BPF_FUNC_skb_store_bytes, CLASSIFIER),
        ("bpf_tail_call", BPF_FUNC_tail_call, BOTH),
        ("bpf_redirect", BPF_FUNC_redirect, CLASSIFIER),
        ("bpf_skb_load_bytes", BPF_FUNC_skb_load_bytes, CLASSIFIER),
        ("bpf_xdp_adjust_head", BPF_FUNC_xdp_adjust_head, XDP),
        ("bpf_redirect_map", BPF_FUNC_redirect_map, XDP),
        ("bpf_xdp_adjust_tail", BPF_FUNC_xdp_adjust_tail, XDP),
        ("bpf_ringbuf_output", BPF_FUNC_ringbuf_output, BOTH),
        ("bpf_ringbuf_reserve", BPF_FUNC_ringbuf_reserve, BOTH),
        ("bpf_ringbuf_submit", BPF_FUNC_ringbuf_submit, BOTH),
        ("bpf_ringbuf_discard", BPF_FUNC_ringbuf_discard, BOTH),
        ("bpf_ringbuf_query", BPF_FUNC_ringbuf_query, BOTH),
    ]
};

/// The names of those functions that the kernel lacks for a kind of program that calls them. Loads one small program
/// for each function and kind, and keeps none.
///
/// # Errors
/// If the kernel does not load a program for another reason.
pub fn missing_helpers() -> Result<Vec<&'static str>, Failure> {
    let mut missing = Vec::new();
    for (name, helper, kinds) in CALLED {
        for kind in kinds {
            if !is_helper_supported(*kind, helper).map_err(|error| Failure::of(&error))? {
                missing.push(name);
                break;
            }
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::CALLED;
    use crate::{object, stubs};
    use std::collections::BTreeSet;

    /// BPF_JMP | BPF_CALL (RFC 9669 §4.3.1). The source register is 0 for a helper by number.
    const CALL: u8 = 0x85;

    #[test]
    fn the_table_holds_each_function_that_the_programs_call() {
        let mut called = BTreeSet::new();
        for octets in [object::OBJECT, stubs::OBJECT] {
            let object = aya_obj::Object::parse(octets).expect("the embedded object parses");
            let instructions = object.functions.values().flat_map(|function| &function.instructions);
            called
                .extend(instructions.filter(|one| one.code == CALL && one.src_reg() == 0).map(|one| one.imm));
        }
        let table: BTreeSet<_> = CALLED.iter().map(|(_, helper, _)| *helper as i32).collect();
        assert_eq!(table, called);
        for (name, helper, _) in CALLED {
            assert_eq!(name.replacen("bpf", "BPF_FUNC", 1), format!("{helper:?}"));
        }
    }
}
