//! Runs the C program `own_protection_domain` over the RDMA device that `HMEM_VERBS_DEVICE` names.
//! `HMEM_C_PROGRAM` names the compiled program, as in the VM tier with `--c`.

#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{env, process::Command};

use trials::{Outcome, Skipped, trials};

trials! {
    /// DOOR-03
    c_program_registers_writes_and_explains_in_its_own_protection_domain,
}

fn variable(name: &str) -> Result<String, Skipped> {
    let value = env::var(name).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| Skipped(format!("{name} is not set")))
}

fn c_program_registers_writes_and_explains_in_its_own_protection_domain() -> Outcome {
    let (device, program) = (variable("HMEM_VERBS_DEVICE")?, variable("HMEM_C_PROGRAM")?);
    let output = Command::new(program).arg(&device).output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    assert!(text.contains("NICs of the library: none"), "{text}");
    assert!(text.contains("wrote 65536 bytes"), "{text}");
    assert!(text.contains(&format!("\"nic\": \"{device}\"")), "{text}");
    assert!(text.contains("closed the program's protection domain"), "{text}");
    Ok(())
}
