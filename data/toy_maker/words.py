"""Word lists: who the stories are about, where they live, and what they find, fear, eat and learn."""

from __future__ import annotations

ANIMALS = """
fox rabbit bear mouse cat dog owl frog duck hedgehog squirrel turtle penguin elephant lion tiger monkey pig sheep goat
horse cow donkey hen chick bird parrot fish whale dolphin crab snail bee butterfly ladybug ant spider bat wolf deer
mole badger otter beaver raccoon koala panda kangaroo giraffe zebra hippo camel crocodile seal swan goose puppy kitten
pony lamb bunny snake lizard dinosaur
""".split()
GIRLS, BOYS = ("girl", "princess", "queen", "mermaid", "witch", "fairy"), ("boy", "prince", "king", "knight", "wizard")
PEOPLE = """
pirate farmer baker sailor teacher painter gardener doctor astronaut giant elf clown cook fisherman dancer singer
inventor explorer shepherd
""".split()
THINGS_ALIVE = """
dragon robot monster unicorn ghost train car boat tractor snowman cloud star tree flower teapot kite toy clock balloon
troll ship bus rocket spaceship scarecrow computer superhero vampire mountain river moon apple pumpkin shoe pencil
book cookie lamp house guitar umbrella puppet doll
""".split()
THINGS_ALIVE += ["teddy bear", "fire truck", "night light", "polar bear", "police car", "rain cloud"]
FRIENDS = """
fox rabbit bear mouse cat dog owl frog duck hedgehog squirrel turtle bird lion monkey pig sheep horse cow hen deer
otter beaver mole badger robot dragon
""".split()
GIRL_NAMES = """
Mia Lily Emma Anna Lucy Sara Zoe Ella Ruby Nina Rosa Clara Ida Molly Daisy Poppy Lulu Tina Amy Sophie Grace Luna Maya
Nora Ivy Hazel Olive Penny Kitty Bella Dora Elsa Fay Gina Holly Jane Kate Lena Mary Nell Pam Rita Sally Tess Wendy
Alice Betty Cora Dina Eva Flora Greta Hanna Iris Julia Lisa Mona Nelly Paula Rose Susie Vera Willa Amelia Olivia Nala
""".split()
BOY_NAMES = """
Tom Ben Sam Max Leo Tim Jack Finn Noah Oscar Hugo Felix Otto Paul Theo Luke Adam Dan Eli Fred Gus Hank Ian Jim Ken
Lars Mark Ned Oli Pete Rob Sid Ted Walt Zack Alex Bill Carl Dave Emil Frank George Harry Jacob Karl Liam Mike Nick
Omar Peter Ralph Simon Tony Victor Will Andy Bob Charlie Danny Henry Joey Louis Martin Oliver Robin Toby Arthur
""".split()
PET_NAMES = """
Pip Bolt Momo Coco Fluffy Spot Rusty Pebble Bubbles Dot Nibbles Whiskers Patch Snowy Sunny Smokey Tiny Zippy Buddy
Biscuit Button Cookie Hoppy Jumpy Pepper Peanut Pumpkin Sparky Speedy Tango Teddy Twinkle Waffles Ziggy Bingo Bobo
Chip Cloudy Ginger Honey Jojo Kiki Lolo Mango Milo Misty Nutty Ollie Pippa Poppo Puff Rocky Scout Shadow Socks Star
Tipsy Toto Tuffy Wally Willow Yoyo Zuzu Acorn Berry Bramble Clover Fern Maple Moss Oak Olly Reed Sage Thistle
""".split()
TRAITS = """
little small shy brave kind lazy clever curious funny happy hungry lonely proud quiet silly sleepy friendly gentle busy
grumpy careful gentle tiny big cheerful clumsy polite strong smart sad messy noisy patient
""".split()
PLACES = """
in a quiet forest|by the sea|on a small farm|in a little village|in a busy town|near a blue lake|on a green hill|
in a tall tree|in a cozy house|at the edge of the woods|in a big garden|on a sunny island|in a small cottage|
near a long river|high in the mountains|in a warm valley|under an old bridge|in a big castle|next to a windmill|
behind a waterfall|in a meadow full of flowers|at the end of a long road|in a dark cave|beside a pond
""".replace("\n", "").split("|")
SPOTS = """
under a big tree|in the tall grass|on the path|near the river|behind a rock|in the snow|under a bush|next to the gate|
in an old box|on the beach|in a hole in the ground|under a pile of leaves|by the well|on the bridge
""".replace("\n", "").split("|")
THINGS = """
golden key|red ball|silver bell|blue hat|shiny coin|little box|old book|green scarf|wooden boat|lost toy|red balloon|
magic stone|small drum|yellow umbrella|pretty shell|lost letter|glass marble|warm blanket|music box|paper crown|
brown bag|big blue egg|tiny shoe|white feather|old lamp|purple ribbon|toy car|silver spoon|magic flute|red mitten
""".replace("\n", "").split("|")
HOBBIES = """
sing songs|look at the clouds|play in the mud|climb trees|read books|dance in the rain|collect shells|sleep in the sun|
paint pictures|tell jokes|run in the wind|count the stars|make soup|ride the bus|watch the boats|draw flowers|swim|
play hide and seek|help others|ask questions|pick flowers|listen to stories|jump over puddles|build towers|drink tea
""".replace("\n", "").split("|")
FOODS = """
apples|berries|cookies|carrots|pancakes|nuts|pears|cherries|plums|muffins|strawberries|honey cakes|grapes|peaches|buns
""".replace("\n", "").split("|")
FEARS = """
the dark|thunder|deep water|high places|loud noises|big dogs|the wind|ghosts|being alone|spiders
""".replace("\n", "").split("|")
SKILLS = """
swim|fly a kite|sing|dance|paint|bake bread|ride a bike|play the drum|climb trees|read|skate|whistle|jump very high|
write letters|cook soup|juggle
""".replace("\n", "").split("|")
BUILDS = """
boat|tree house|kite|sandcastle|little bridge|raft|snow house|bird house|wagon|swing|tower of blocks|flying machine
""".replace("\n", "").split("|")
GIFTS = """
a warm scarf|a painted stone|a birthday cake|a flower crown|a funny song|a little drum|a picture|a pot of soup|
a red hat|a paper star
""".replace("\n", "").split("|")
SEEDS = "sunflower|pumpkin|apple tree|rose|bean|tomato plant|cherry tree|tulip|giant carrot".split("|")
GIANTS = "dragon|bear|giant|wolf|monster|lion|troll|whale|elephant|bull".split("|")

GREETINGS = "Hello!|Hi!|Hello|Hi|Hey|Hi there!|Good morning!|hello|hi|Hey there!|Good evening.|Hello there".split("|")
WHO = """
Who are you?|What are you?|What is your name?|What can you do?|Are you a robot?|Can you help me?|
Tell me about yourself.|who are you|What's your name?|Are you a human?|What do you know?
""".replace("\n", "").split("|")
THANKS = """
Thank you!|Thanks!|That was nice.|I liked that story.|Thank you|That was a good story!|thanks|Great story!|
Thank you very much!|I love it!|Nice!|Wow!
""".replace("\n", "").split("|")
MORE = """
Another one, please|Another one, please.|Tell me another story.|One more!|Tell me another one!|Can I have one more?|
Another story, please!|More, please.|another one|Again!
""".replace("\n", "").split("|")
BYES = "Bye!|Goodbye!|Good night!|See you!|Bye|Good night|See you tomorrow!".split("|")
FEELINGS = "How are you?|How are you today?|How do you feel?|How is it going?|how are you".split("|")
OTHER = """
What is {n} plus {m}?|What is the capital of France?|Write a program in Python.|What time is it?|
Who is the president?|How does a computer work?|Translate this into German.|What is the weather like?|
Explain gravity.|Help me with my homework.|How tall is Mount Everest?|What is 2+2?|Can you write code?|
What should I eat?|Why is the sky blue?|Give me some advice.|What is the meaning of life?|Who won the game?|
Solve this equation.|Write an essay about history.|What is a transformer?|Tell me a joke.|Write a poem.|
How do I cook rice?|What day is it today?|Do you like music?|What is a GPU?
""".replace("\n", "").split("|")
SYSTEMS = """
You are a helpful assistant.|You tell short stories.|You are a kind storyteller.|You are a helpful AI assistant.|
You tell stories to small children.|Answer in simple words.|Be friendly.|You are Toy, a small model that tells stories.
""".replace("\n", "").split("|")
