"""What benchmarks and tests share: supervised runs, planted faults, slow links. May import toolkit, never tests."""
